"""A run as it is displayed. `--json` everywhere prints `to_json` of a `View`; `SCHEMA` is raised when a field changes
its meaning or is removed, not when one is added.

Every duration is in seconds, every `*_at` is unix time; unknown values are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from streamrl.protocol.transport.types import RunState
from streamrl.telemetry.progress import GONE_S

SCHEMA = 1

Level = Literal["info", "attention", "blocking"]
Verdict = Literal["healthy", "degraded", "stalled", "ended"]
EXIT_CODES: Mapping[Verdict, int] = {"healthy": 0, "degraded": 3, "stalled": 4, "ended": 5}
EXIT_UNREACHABLE = 6  # Redis does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    name: str
    uid: str | None
    state: RunState | Literal["absent", "crashed"]  # crashed: it was running when it ended
    control: str  # the operator's command: run, pause, drain, stop
    term: int
    step: int
    max_steps: int | None
    data_epochs: float | None  # passes over the prompts
    created_at: float | None
    eta_s: float | None
    share_done: float | None  # 0 to 1
    error: str | None = None  # why it failed
    ended_at: float | None = None
    folder: str | None = None  # set if only the folder is left, and its Redis is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of the run that define what is normal."""

    max_lag_steps: int | None = None
    groups_per_step: int | None = None
    max_backlog_bytes: int | None = None
    idle_timeout_s: float | None = None
    max_attempts: int | None = None
    stale: str | None = None
    checkpoint_timeout_s: float | None = None
    model_dtype: str | None = None  # the learner's; below it the workers'; never `auto`
    weights_dtype: str | None = None
    arithmetic: str | None = None  # the coarser of the two: float32 or bfloat16
    reward_sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """A part's own report, and its age."""

    name: str
    role: str
    host: str
    pid: int
    state: str  # starting, working, waiting, stopping; silent: it has not reported for a while
    doing: str  # the activity, or the wait
    doing_s: float  # since it began
    progress_s: float  # since the last progress
    report_s: float  # since the last report

    @property
    def alive(self) -> bool:
        """Not gone: a part on a busy machine may be silent for a moment."""
        return self.report_s <= GONE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    lead: PartStatus | None  # rank 0; None: it has never reported, or has shut down in order
    ranks: int  # with reports
    holder: str | None  # of the run's lease
    lease_left_s: float | None
    metrics: Mapping[str, float]  # of the last step, by name (telemetry.metrics)
    validation: Mapping[str, float]  # of the last validation, by name
    rewards: tuple[float, ...]  # by step, oldest first, thinned
    held_out: Mapping[str, tuple[float, ...]]  # by reward source, the means of the validations
    step_s: float | None  # that a step usually takes
    is_new: bool  # it has made no step since it started, and may still have to compile
    skipped_lately: int  # recent steps that changed nothing because a loss or gradient was not finite
    fresh_mismatch: tuple[float, ...]  # of recent steps with fresh samples, oldest first
    live: Mapping[str, float]  # its current counters, also between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    part: PartStatus
    version: str | None
    step: int | None  # of that version
    lag: int | None  # steps behind the newest version
    tokens_per_s: float | None
    in_flight: int | None
    kv_use: float | None  # share of the KV cache
    leases: int
    delivered: int
    failed: int
    ended_lately: int  # of its last tickets, those delivered or failed
    failed_lately: int
    loads: int  # weight versions loaded
    loads_in_flight: int  # of these, loaded while samples were being generated
    rejected: str  # why the engine rejected new weights; "": it did not
    rejected_version: str  # their version; "": none
    detail: Mapping[str, int | float | str]  # all that it reports


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    name: str
    mean: float | None  # of the last step
    latency_s: float | None  # mean over workers
    scored: int  # since the start of the workers that report
    errors: int
    state: str | None  # the worst that any worker reports: well, or what is out
    tokens: int | None = None  # read and written by judges for all workers; None for other sources


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    purpose: str
    tickets: int
    leased: int
    groups: int
    group_bytes: int
    oldest_worker: str | None  # the holder of the ticket that was issued first
    oldest_s: float | None  # since it was issued
    oldest_silent_s: float | None  # since its lease was renewed
    oldest_times: int | None  # how often it was leased


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsStatus:
    latest: str | None
    step: int | None
    age_s: float | None
    kept: int  # versions with a manifest
    num_bytes: float | None  # of the newest
    largest_bytes: float | None  # of recent versions: usually an anchor
    changed_share: float | None  # of elements, in the newest
    published: int | None  # versions announced since the start of the run
    behind: int  # workers that serve an older version
    worst_lag: int  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    trained: int
    dropped: int
    by_reason: Mapping[str, int]
    rate_by_length: Mapping[str, float]  # by upper bounds of the longest response; of the whole run only
    ignored: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    count: int
    retry_requests: int
    latest: tuple[Mapping[str, str], ...]  # {ticket, error}, newest first


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStatus:
    server: str
    version: str
    used_bytes: int
    max_bytes: int  # 0: no limit
    policy: str
    role: str
    save_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What holds the run back, or explains why it does nothing."""

    name: str = ""  # its key in `causes.TABLE`
    level: Level
    title: str
    evidence: str
    remedy: str


blocking = partial(Cause, level="blocking")  # it stops the run
attention = partial(Cause, level="attention")  # it needs attention
info = partial(Cause, level="info")  # it explains why the run does what it does


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    schema: int = SCHEMA
    at: float
    run: RunStatus
    limits: Limits
    learner: LearnerStatus
    workers: tuple[WorkerStatus, ...]
    others: tuple[PartStatus, ...]  # launcher, reward server, further ranks
    restarts: int  # of dead parts, as the launcher counts them
    rewards: tuple[RewardSource, ...]
    streams: tuple[StreamStatus, ...]
    weights: WeightsStatus
    drops: Drops
    drops_lately: Drops  # over the last steps, and since
    dead: Dead
    redis: RedisStatus
    prompts: Mapping[str, int] = field(default_factory=dict)  # of a curriculum: new, fitting, solved, hopeless ones
    summary: Mapping[str, Any] | None = None  # outcome of the last launch, if only the folder is left
    unreadable: tuple[str, ...] = ()  # malformed entries in Redis under the run's name
    verdict: Verdict = "healthy"
    causes: tuple[Cause, ...] = ()  # most important first

    @property
    def train(self) -> StreamStatus:
        return self.streams[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
