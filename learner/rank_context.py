"""What one rank is given to work with, before it knows whether it leads or follows, and whether the run is a replay.

tokenizer and configuration of the model ─► RankContext ─► rank 0 reads the prompts, the others wait ─► the model

What the loop asks of its conductor, and the conductor of every rank but the first, which follows.

    rank 0   learner.conductor: decides, broadcasts, records          others   Follower: hears, and records nothing

What returns something is a collective: all ranks call it, and all get what rank 0 decided, within about a second. The
rest tells rank 0 what the ranks did, and is nothing to the others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from streamrl.config import schema
from streamrl.learner.groups.plan import GroupCheck, Outcome, Plan
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.metrics.record import Timers
from streamrl.learner.model.load import TokenizerInfo, load_policy, read_tokenizer_info
from streamrl.learner.model.policy import Policy
from streamrl.learner.process.notes import job_began
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.telemetry.progress import Progress, Wait

if TYPE_CHECKING:
    from streamrl.learner.checkpoints.checkpoint import Files
    from streamrl.learner.checkpoints.terms import CheckpointName
    from streamrl.learner.publishing.publish import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    config: schema.Config
    world: World
    patient: World  # the same ranks, for waiting while one of them is at the disk
    tokenizer_info: TokenizerInfo
    progress: Progress
    watchdog: Watchdog
    timers: Timers
    stop: threading.Event  # a signal asked us, or another rank, to end
    job_began: float  # on the clock of `time.monotonic`
    elastic: bool = False  # whoever is asked to end leaves, and the other machines go on


def surround(
    config: schema.Config,
    world: World,
    progress: Progress,
    *,
    stop: threading.Event,
    environment: Mapping[str, str],
    elastic: bool = False,
) -> RankContext:
    return RankContext(
        config=config,
        world=world,
        patient=world.beside(timeout_s=at_disk_s(config)),
        tokenizer_info=read_tokenizer_info(config.model.path),
        progress=progress,
        watchdog=Watchdog(limit_s=stall_limit_s(config), at_disk_s=at_disk_s(config)),
        timers=Timers(),
        stop=stop,
        job_began=job_began(environment),
        elastic=elastic,
    )


def rank_progress(world: World) -> Progress:
    return Progress(part=f"learner/{world.rank}", role="learner")


def stall_limit_s(config: schema.Config) -> float:
    """Without a round of the loop for so long a rank ends itself: longer than Redis may be away, twice over."""
    return 60 + 2 * config.redis.give_up_after_s


def at_disk_s(config: schema.Config) -> float:
    """Likewise, while files as large as the model are written or read, which one rank may do while all others wait."""
    return stall_limit_s(config) + config.checkpoint.timeout_s


def read_train_prompts(context: RankContext) -> PromptSet:
    config = context.config
    return PromptSet.load_train(tokenizer=context.tokenizer_info.tokenizer, data=config.data, seed=config.seed)


def load_model_together(context: RankContext) -> Policy:
    """A collective; rank 0 reads the prompts before, for as long as it takes."""
    context.patient.barrier()
    torch.manual_seed(context.config.seed)
    return load_policy(context.config, context.world, context.tokenizer_info.end_ids)


class Conducting(Protocol):
    def next_plan(self, step: int, *, may_train: bool = True) -> Plan:
        """What all ranks do next. `may_train=False`: weights do not get out, and training would run too far ahead."""
        ...

    def must_stop(self, *, after_s: float = 0.0) -> bool:
        """Whether to end; `after_s` this long from now, before something that failed is tried again."""
        ...

    def look_at_validation(self) -> Outcome:
        """At the one that runs: what has come of it is taken up."""
        ...

    def start_validation(self, latest: Published | None) -> None:
        """Of this version, which is the newest that is out."""
        ...

    def validate_beside(self, step: int, latest: Published | None) -> None:
        """Likewise; of the next one, if these weights are older than this step's. Training goes on meanwhile."""
        ...

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None:
        """The groups of the plan were looked at, and trained if an update was made of them."""
        ...

    def note_published(self, published: Published) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...

    def commit(self, name: CheckpointName, *, consumed_samples: int, files: Files) -> None:
        """All ranks have written: make it the newest checkpoint."""
        ...


class Follower:
    def __init__(self, context: RankContext) -> None:
        self._context = context

    def next_plan(self, step: int, *, may_train: bool = True) -> Plan:
        return Plan.from_bytes(self._hear())

    def must_stop(self, *, after_s: float = 0.0) -> bool:
        return bool(self._hear()[0])

    def look_at_validation(self) -> Outcome:
        return Outcome(self._hear()[0])

    def _hear(self) -> bytes:
        self._context.watchdog.beat()
        with self._context.progress.waiting(Wait.PEERS):
            return self._context.world.broadcast(None)

    def start_validation(self, latest: Published | None) -> None: ...

    def validate_beside(self, step: int, latest: Published | None) -> None: ...

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None: ...

    def note_published(self, published: Published) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...

    def commit(self, name: CheckpointName, *, consumed_samples: int, files: Files) -> None: ...
