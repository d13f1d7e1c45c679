"""A run as people look at it. `to_json` of a `View` is what `--json` prints everywhere; `SCHEMA` grows when a field
changes its meaning or goes, not when one is added.

Every duration is in seconds, every `*_at` is unix time; what is not known is null.
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
class Run:
    name: str
    uid: str | None
    state: RunState | Literal["absent", "crashed"]  # crashed: it was running when it ended
    control: str  # the operator's word: run, pause, drain, stop
    term: int
    step: int
    max_steps: int | None
    data_epochs: float | None  # passes over the prompts
    created_at: float | None
    eta_s: float | None
    share_done: float | None  # 0 to 1
    error: str | None = None  # what has ended it, where it failed
    ended_at: float | None = None
    folder: str | None = None  # which alone tells of the run: its Redis is not there any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of the run that say what is normal."""

    max_lag_steps: int | None = None
    groups_per_step: int | None = None
    max_backlog_bytes: int | None = None
    idle_timeout_s: float | None = None
    max_attempts: int | None = None
    stale: str | None = None
    model_dtype: str | None = None  # in which the learner computes, and below what workers generate with: never `auto`
    weights_dtype: str | None = None
    arithmetic: str | None = None  # the coarser of the two: float32 or bfloat16
    reward_sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part says of itself, and how fresh that is."""

    name: str
    role: str
    host: str
    pid: int
    state: str  # starting, working, waiting, stopping; silent: it has not reported for a while
    doing: str  # the activity, or what it waits for
    doing_s: float  # for so long
    progress_s: float  # since it last got on
    report_s: float  # since it last reported

    @property
    def alive(self) -> bool:
        """A part may be silent for a moment, when its machine is busy, without being gone."""
        return self.report_s <= GONE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    lead: Part | None  # rank 0; None: it has never reported, or left in order
    ranks: int  # that report
    holder: str | None  # who holds the run
    lease_left_s: float | None
    metrics: Mapping[str, float]  # of the last step, by their names (telemetry.metrics)
    validation: Mapping[str, float]  # those of the last validation
    rewards: tuple[float, ...]  # of the steps that were read, oldest first, thinned
    held_out: Mapping[str, tuple[float, ...]]  # by reward source, the means of the validations that were read
    skipped_lately: int  # of the last steps, those that changed nothing: a loss or gradient was not finite
    fresh_mismatch: tuple[float, ...]  # of the last steps that had fresh samples, oldest first
    live: Mapping[str, float]  # its counters now, also between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    part: Part
    version: str | None
    step: int | None  # of that version
    lag: int | None  # versions' steps behind the newest
    tokens_per_s: float | None
    in_flight: int | None
    kv_use: float | None  # share of the KV cache
    leases: int
    delivered: int
    failed: int
    loads: int  # weight versions that it took up
    loads_in_flight: int  # of them with samples being generated
    rejected: str  # what the engine failed at when it was to load new weights; "": nothing
    rejected_version: str  # of those weights; "": none
    detail: Mapping[str, int | float | str]  # all that it reports


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    name: str
    mean: float | None  # of the last step
    latency_s: float | None  # mean over workers
    scored: int  # since the workers that report began
    errors: int
    state: str | None  # as the worker has it that fares worst: well, or what is out
    tokens: int | None = None  # that judges have read and written for all workers; None of other sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    purpose: str
    tickets: int
    leased: int
    groups: int
    group_bytes: int
    oldest_worker: str | None  # who has the ticket that was issued first
    oldest_s: float | None  # ago
    oldest_silent_s: float | None  # since that lease was renewed
    oldest_times: int | None  # that it was leased


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    latest: str | None
    step: int | None
    age_s: float | None
    kept: int  # versions whose manifests are there
    num_bytes: float | None  # of the newest
    largest_bytes: float | None  # of the recent ones: an anchor, as a rule
    changed_share: float | None  # of elements, in the newest
    behind: int  # workers that serve an older version
    worst_lag: int  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    trained: int
    dropped: int
    by_reason: Mapping[str, int]
    rate_by_length: Mapping[str, float]  # by the longest response, up to so many tokens
    ignored: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    count: int
    retry_requests: int
    latest: tuple[Mapping[str, str], ...]  # {ticket, error}, the newest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Redis:
    server: str
    version: str
    used_bytes: int
    max_bytes: int  # 0: no limit
    policy: str
    role: str
    save_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that holds the run back, or explains why it does nothing."""

    name: str = ""  # what `causes.TABLE` calls it
    level: Level
    title: str
    evidence: str
    remedy: str


blocking = partial(Cause, level="blocking")  # it stops the run
attention = partial(Cause, level="attention")  # somebody should look
info = partial(Cause, level="info")  # it explains why the run does what it does


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    schema: int = SCHEMA
    at: float
    run: Run
    limits: Limits
    learner: Learner
    workers: tuple[Worker, ...]
    others: tuple[Part, ...]  # launcher, reward server, further ranks
    restarts: int  # of parts that died, as the launcher counts them
    rewards: tuple[RewardSource, ...]
    streams: tuple[Stream, ...]
    weights: Weights
    drops: Drops
    drops_lately: Drops  # in the last steps, and since
    dead: Dead
    redis: Redis
    prompts: Mapping[str, int] = field(default_factory=dict)  # of a curriculum: new, fitting, solved, hopeless ones
    summary: Mapping[str, Any] | None = None  # what the last launch came to, where the folder alone tells
    unreadable: tuple[str, ...] = ()  # what lies in Redis under the run's name and is not what it should be
    verdict: Verdict = "healthy"
    causes: tuple[Cause, ...] = ()  # the first is the one to look at

    @property
    def train(self) -> Stream:
        return self.streams[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
