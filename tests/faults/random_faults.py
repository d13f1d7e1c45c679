"""A run of stand-ins exposed to random faults: a learner, some workers, two degraded routes, a Redis that dies.

    volley: one to three injections start ─► a moment ─► they end ─► dead parts are replaced ─► next checkpoint ─► ...

The seed decides what happens; when exactly it hits the run depends on the machine. At the end the run is drained, the
independent audit judges, and leaks are counted. Every wait is bounded.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.measure import Say
from streamrl.config import schema
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.faults.place import Place
from tests.faults.random_injections import INJECTIONS, NEED_REDIS
from tests.faults.random_leaks import Footprint, shared_by_others, unknown_keys
from tests.faults.random_outcome import Leaks, Outcome
from tests.faults.random_team import Team
from tests.helpers import wait_until

_RECOVERED_WITHIN_S = 60.0
_MOST_AT_ONCE = 3
_LASTS_S = (0.1, 1.5)
_SPARE_DESCRIPTORS = 8  # connections that a part keeps for reuse
_SAY_EVERY = 20  # volleys
_TO_END_S = 180  # time for a run in addition to its own


def run_at_random(folder: Path, *, seconds: float, seed: int, say: Say) -> Outcome:
    say(f"seed {seed}, {seconds:.0f} s")
    before, strangers = Footprint.now(), set[int]()
    outcome = _suffer(
        folder, seconds=seconds, seed=seed, say=say, on_volley=lambda: strangers.update(shared_by_others())
    )
    seen = outcome.leaks
    leaks = before.leaks_since(strangers, num_keys=seen.keys, num_descriptors_of_parts=seen.descriptors)
    return replace(outcome, leaks=leaks)


def _suffer(folder: Path, *, seconds: float, seed: int, say: Say, on_volley: Callable[[], None]) -> Outcome:
    """Run it; the outcome has the leaks that are only visible while the run exists."""
    with ExitStack() as parts:
        server = EmbeddedRedis.start(folder / "redis")
        place = _make_place(folder, server.url, seconds)
        client = parts.enter_context(connect(place.url, schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0)))
        team = Team(place, client, parts, server)
        ordeal = _Ordeal(team, random.Random(seed), say)
        ordeal.wait_for_progress("the run is at work")
        usual, began = team.num_descriptors() + _SPARE_DESCRIPTORS, time.monotonic()
        while time.monotonic() < began + seconds:
            ordeal.volley()
            on_volley()
        more = max(0, team.num_descriptors() - usual)
        audit = team.drain()
        num_keys = len(unknown_keys(client, team.world.keys))
        return Outcome(
            seed=seed,
            seconds=time.monotonic() - began,
            injections=dict(ordeal.injections),
            recoveries_s=tuple(ordeal.recoveries_s),
            wasted_steps=team.num_wasted_steps(),
            wrong_weights=team.num_wrong_weights(),
            surprises=tuple(team.surprises()),
            num_given_up=team.num_given_up(),
            leaks=Leaks(processes=0, descriptors=more, threads=0, keys=num_keys, shared_memory=0),
            audit=audit,
        )


def _make_place(folder: Path, url: str, seconds: float) -> Place:
    """More prompts than can be used in any time; short waits, so that much happens. If Redis is emptied before a new
    worker has weights, the learner waits for groups until it gives up, and its successor publishes again."""
    return Place(
        folder=folder,
        name="chaos",
        url=url,
        store=f"file:{folder / 'blobs'}",  # not lost with Redis
        num_prompts=1000,
        max_epochs=100_000,
        pace_s=0.05,
        reply_timeout_s=1.0,
        idle_timeout_s=10.0,
        deadline_s=int(seconds) + _TO_END_S,
    )


class _Ordeal:
    def __init__(self, team: Team, chance: random.Random, say: Say) -> None:
        self.injections: Counter[str] = Counter()
        self.recoveries_s: list[float] = []
        self._team, self._chance, self._say = team, chance, say
        self._moment = threading.Event()  # never set: for waiting
        self._num_volleys = 0

    def volley(self) -> None:
        kinds = self._chance.sample(sorted(INJECTIONS), k=self._chance.randint(1, _MOST_AT_ONCE))
        kinds.sort(key=lambda kind: kind not in NEED_REDIS)
        with ExitStack() as under_way:
            for kind in kinds:
                under_way.enter_context(INJECTIONS[kind](self._team, self._chance))
            self._moment.wait(self._chance.uniform(*_LASTS_S))
        self.injections.update(kinds)
        self.recoveries_s.append(self.wait_for_progress(f"a checkpoint after: {', '.join(kinds)}"))
        self._num_volleys += 1
        if self._num_volleys % _SAY_EVERY == 0:
            step, longest = self._team.world.newest_checkpoint(), max(self.recoveries_s)
            self._say(f"{self.injections.total()} injections, checkpoint {step}, longest recovery {longest:.1f} s")

    def wait_for_progress(self, description: str) -> float:
        """Return the seconds until a new checkpoint is made."""
        before, began = self._team.world.newest_checkpoint(), time.monotonic()

        def has_gone_on() -> bool:
            self._team.tend()
            return self._team.world.newest_checkpoint() > before

        try:
            wait_until(has_gone_on, description=description, timeout_s=_RECOVERED_WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._team.last_words()}") from None
        return time.monotonic() - began
