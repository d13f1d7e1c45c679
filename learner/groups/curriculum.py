"""Which prompt each place asks for: in the data's order (`DataOrder`) or chosen by past rewards (`Curriculum`).

Tickets stand for places (`groups.numbering`).

    data's order      0 1 2 3 4 5 6 7 8 9 ...   candidates, pass after pass, without end
    admitted          y . y y . . y . y y       each with its own chance, by a random draw fixed by seed and pass
    places            0   1 2     3   4 5       as many as without a curriculum

The chance comes from the pool (`groups.pool`), so prompts are drawn in proportion to it, each at most once a pass, and
in the data's order while nothing is known. A group's size never depends on other groups' outcomes, and no answer
influences whether it was asked for, so the mean gradient is that of the prompts, weighted by their chances.

What a place asks for is fixed when it is drawn, and never changes afterwards:

    groups that ended ─► pool ─► a block of draws ─► a line of the log, synced ─► tickets
                          │                              │
                          └───────► checkpoint ◄─────────┘   pool, and the places that may still be issued

    crash, takeover   places beyond the checkpoint come from the logs since its term: tickets in flight keep their
                      meaning. Groups that ended since then end again, and are observed again
    a log is lost     these places are drawn again; tickets in Redis under their numbers are of another lineage: deleted
    fork              has the checkpoint's pool and places; or starts afresh with its own data
    switched off      open and dead tickets keep their prompts (`DataOrder`); the pool is forgotten
    Redis rolls back  a number asks for what it did before, or its identity differs (`wire.ticket`)
    replay            draws nothing: `UnknownOrder`

A pass is counted in candidates. Observations of a ticket belong to the pass it was drawn in, so the same groups make
the same pool whether or not a learner died in between. `draw` blocks on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from streamrl.config import schema
from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.draws import DrawLog, Draws
from streamrl.learner.groups.ledger import CurriculumState, FeedState, Ledger
from streamrl.learner.groups.pool import Pool
from streamrl.learner.groups.prompts import PromptSet
from streamrl.protocol.wire.group import GroupHeader


class PromptOrder(Protocol):
    @property
    def num_drawn(self) -> int:
        """Places below this number have their prompt."""
        ...

    def draw(self, num_places: int) -> None:
        """Extend the order to so many places; fewer if the disk is full."""
        ...

    def knows(self, place: int) -> bool: ...

    def locate(self, place: int) -> tuple[int, int]:
        """(passes over the data before it, index of its row)"""
        ...

    def ended(self, place: int, header: GroupHeader, *, informative: bool) -> None:
        """Observe a group of this place, whether it is trained or not."""
        ...

    def state(self, ledger: Ledger) -> CurriculumState | None:
        """The order's part of a checkpoint, given the tickets' outcomes."""
        ...

    def metrics(self) -> dict[str, float]: ...


class DataOrder:
    def __init__(
        self,
        prompts: PromptSet,
        *,
        num_places: int,
        drawn: Mapping[int, tuple[int, int]] | None = None,  # places whose prompts a curriculum has chosen before
    ) -> None:
        self._prompts, self._drawn = prompts, dict(drawn or {})
        self.num_drawn = num_places

    def draw(self, num_places: int) -> None: ...

    def knows(self, place: int) -> bool:
        return True

    def locate(self, place: int) -> tuple[int, int]:
        return self._drawn.get(place) or self._prompts.locate(place)

    def ended(self, place: int, header: GroupHeader, *, informative: bool) -> None: ...

    def state(self, ledger: Ledger) -> CurriculumState | None:
        """None once no ticket is left of a curriculum before."""
        self._drawn = _retained(self._drawn, ledger)
        return _state_after(self, ledger) if self._drawn else None

    def metrics(self) -> dict[str, float]:
        return {}


class UnknownOrder:
    """The order of a replay, which does not know which prompts its groups answer."""

    num_drawn = 0

    def draw(self, num_places: int) -> None: ...

    def knows(self, place: int) -> bool:
        return False

    def locate(self, place: int) -> tuple[int, int]:
        raise AssertionError(f"a replay does not know the prompt of place {place}")

    def ended(self, place: int, header: GroupHeader, *, informative: bool) -> None: ...

    def state(self, ledger: Ledger) -> CurriculumState | None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}


class Curriculum:
    def __init__(
        self,
        prompts: PromptSet,
        *,
        num_samples: int,
        num_places: int,
        block: int,  # minimum draws at once: each block is one synced line of the log
        log: DrawLog | None = None,  # None: the run has no folder
        state: CurriculumState | None = None,
    ) -> None:
        state = state or CurriculumState()
        self._prompts, self._num_places, self._block, self._log = prompts, num_places, block, log
        self._pool = Pool([row.dataset for row in prompts.rows], num_samples=num_samples, packed=state.prompts)
        self._places, self._census = dict(state.places), self._pool.census(0)
        self.num_drawn, self._num_visited = state.num_drawn, state.num_visited
        self._num_refused = 0  # draws refused by the disk, in a row
        if log is not None and (draws := log.earlier(self.num_drawn)):
            self._take(draws)

    def draw(self, num_places: int) -> None:
        if num_places <= self.num_drawn:
            return
        wanted = min(max(num_places, self.num_drawn + self._block), self._num_places) - self.num_drawn
        self._pool.refit()
        draws = self._choose(wanted)
        if self._log is not None and not self._log.write(draws):
            self._num_refused += 1
            return
        self._num_refused = 0
        crashpoint("draws.written")
        self._take(draws)
        self._census = self._pool.census(self._num_visited // self._prompts.num_places(1))

    def knows(self, place: int) -> bool:
        return place in self._places

    def locate(self, place: int) -> tuple[int, int]:
        return self._places[place]

    def ended(self, place: int, header: GroupHeader, *, informative: bool) -> None:
        data_epoch, row = self._places[place]
        if header.sample_rewards:
            self._pool.observe(row, header.sample_rewards, at=data_epoch, informative=informative)

    def state(self, ledger: Ledger) -> CurriculumState:
        """The state to checkpoint; forgets places that can no longer be issued."""
        ahead = range(ledger.retries.num_places(ledger.issued), self.num_drawn)
        needed = sorted({*_retained_places(ledger), *ahead})
        self._places = {place: self._places[place] for place in needed if place in self._places}
        return CurriculumState(
            num_drawn=self.num_drawn,
            num_visited=self._num_visited,
            places=dict(self._places),
            prompts=self._pool.packed(),
        )

    def metrics(self) -> dict[str, float]:
        """The pool's census as of the latest draws."""
        found = {f"curriculum/prompts/{kind}": float(count) for kind, count in self._census.items()}
        passes = self._num_visited / self._prompts.num_places(1)
        return {**found, "curriculum/passes": passes, "curriculum/refused": float(self._num_refused)}

    def _choose(self, count: int) -> Draws:
        chosen: list[tuple[int, int]] = []
        chances: list[float] = []
        visited, of_a_pass = self._num_visited, self._prompts.num_places(1)
        while len(chosen) < count:
            data_epoch, first = divmod(visited, of_a_pass)
            rows, uniforms = self._prompts.candidates(data_epoch)
            admission = self._pool.admission(data_epoch)[rows[first:]]
            admitted = np.flatnonzero(uniforms[first:] < admission)[: count - len(chosen)]
            chosen += [(data_epoch, int(row)) for row in rows[first:][admitted]]
            chances += admission[admitted].tolist()
            visited += int(admitted[-1]) + 1 if len(chosen) == count else of_a_pass - first
        return Draws(first=self.num_drawn, num_visited=visited, asked=tuple(chosen), chances=tuple(chances))

    def _take(self, draws: Draws) -> None:
        self._places.update(enumerate(draws.asked, draws.first))
        self.num_drawn, self._num_visited = draws.first + len(draws.asked), draws.num_visited


def open_order(
    config: schema.Config,
    prompts: PromptSet,
    *,
    root: Path | None = None,  # the run's folder
    term: int = 1,
    since: int = 0,  # term of the checkpoint
    state: FeedState | None = None,
) -> PromptOrder:
    """The order that the settings ask for."""
    num_places = prompts.num_places(config.training.max_epochs)
    restored = state or FeedState()
    ledger = Ledger(restored.ledger)
    if not config.data.curriculum:
        drawn = _retained(restored.curriculum.places, ledger) if restored.curriculum is not None else {}
        return DataOrder(prompts, num_places=num_places, drawn=drawn)
    return Curriculum(
        prompts,
        num_samples=config.sampling.num_samples,
        num_places=num_places,
        block=config.training.groups_per_step,
        log=DrawLog(root, term=term, since=since) if root is not None else None,
        state=restored.curriculum or _state_after(DataOrder(prompts, num_places=num_places), ledger),
    )


def _state_after(order: DataOrder, ledger: Ledger) -> CurriculumState:
    """The initial state of a curriculum in a run that had none so far."""
    begin = ledger.retries.num_places(ledger.issued)
    places = {place: order.locate(place) for place in sorted(_retained_places(ledger))}
    return CurriculumState(num_drawn=begin, num_visited=begin, places=places)


def _retained(places: Mapping[int, tuple[int, int]], ledger: Ledger) -> dict[int, tuple[int, int]]:
    """Those of the places that may still be asked."""
    if not places:
        return {}
    retained = _retained_places(ledger)
    return {place: asked for place, asked in places.items() if place in retained}


def _retained_places(ledger: Ledger) -> set[int]:
    """Places of open tickets, and of dead ones that may be retried."""
    return {ledger.retries.place(number) for number in (*ledger.open_tickets(), *ledger.letters)}
