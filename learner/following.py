"""What the loop asks of its conductor, and the conductor of every rank but the first, which follows.

    rank 0   learner.conductor: decides, broadcasts, records          others   Follower: hears, and records nothing

What returns something is a collective: all ranks call it, and all get what rank 0 decided, within about a second. The
rest tells rank 0 what the ranks did, and is nothing to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from learner.stream.plan import Outcome, Plan, Verdict
from streamrl.telemetry.progress import Wait

if TYPE_CHECKING:
    from learner.checkpoints.checkpoint import Files
    from learner.checkpoints.epochs import CheckpointName
    from learner.publishing.publish import Published
    from learner.surroundings import Surroundings


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

    def settle(self, plan: Plan, verdicts: Sequence[Verdict], *, trained: bool) -> None:
        """The groups of the plan were looked at, and trained if an update was made of them."""
        ...

    def note_published(self, published: Published) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...

    def commit(self, name: CheckpointName, *, consumed_samples: int, files: Files) -> None:
        """All ranks have written: make it the newest checkpoint."""
        ...


class Follower:
    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def next_plan(self, step: int, *, may_train: bool = True) -> Plan:
        return Plan.from_bytes(self._hear())

    def must_stop(self, *, after_s: float = 0.0) -> bool:
        return bool(self._hear()[0])

    def look_at_validation(self) -> Outcome:
        return Outcome(self._hear()[0])

    def _hear(self) -> bytes:
        self._around.watchdog.beat()
        with self._around.progress.waiting(Wait.PEERS):
            return self._around.world.broadcast(None)

    def start_validation(self, latest: Published | None) -> None: ...

    def validate_beside(self, step: int, latest: Published | None) -> None: ...

    def settle(self, plan: Plan, verdicts: Sequence[Verdict], *, trained: bool) -> None: ...

    def note_published(self, published: Published) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...

    def commit(self, name: CheckpointName, *, consumed_samples: int, files: Files) -> None: ...
