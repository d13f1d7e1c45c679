"""A run as monitors see it: the real streams of a `RunWorld`, and reports of parts that say what a test wants."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import redis

from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.telemetry.progress import Report
from tests.redis.run_world import RunWorld

NO_REPORT = Report(
    part="", role="worker", host="here", pid=1, state="working", doing="", since=0, last_progress=0, at=0
)


class Watched:
    """Reports are written as the parts' own threads would write them."""

    def __init__(self, world: RunWorld) -> None:
        self.world = world
        self._reported: dict[str, Callable[[], None]] = {}

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Inside, what was reported is reported again and again, as by parts that live."""
        stopped = threading.Event()

        def again() -> None:
            while not stopped.wait(0.3):
                for write in list(self._reported.values()):
                    with contextlib.suppress(redis.RedisError):  # the test may have ended the server
                        write()

        thread = threading.Thread(target=again, name="reports again")
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def report(self, part: str, doing: str, *, ago_s: float = 0.0, for_s: float = 0.0, **changes: Any) -> None:
        """`ago_s`: since it reported; `for_s`: since it got on, when it did."""
        self._reported[part] = partial(self._write, part, doing, ago_s=ago_s, for_s=for_s, **changes)
        self._reported[part]()

    def _write(self, part: str, doing: str, *, ago_s: float, for_s: float, **changes: Any) -> None:
        at = time.time() - ago_s
        changes = {"role": part.partition("/")[0], "since": at - for_s, "last_progress": at - for_s, **changes}
        report = replace(NO_REPORT, part=part, doing=doing, at=at, **changes)
        self.world.client.hset(self.world.keys.progress, part, encode_report(report))

    def learner(self, doing: str = "groups", *, state: str = "waiting", **changes: Any) -> None:
        live = self.world.learner.feed.metrics()
        self.report("learner/0", doing, state=state, detail={"step": self.world.learner.step, **live}, **changes)

    def worker(self, doing: str = "generate", *, name: str = "w", state: str = "working", **changes: Any) -> None:
        self.report(f"worker/{name}", doing, state=state, **changes)

    def healthy(self) -> None:
        self.learner("train", state="working")
        self.worker()

    def record(self, **values: float) -> None:
        """A step's record, as the learner writes it."""
        learner = self.world.learner
        metrics = {"train_rollouts/rewards": 0.5, "timers/step": 1.0, **learner.feed.metrics(), **values}
        learner.stream.record(learner.step, {"train_optim/optim_step": float(learner.step), **metrics})

    def view(self) -> View:
        keys = self.world.keys
        return build_view(snapshot(self.world.client, keys, num_records=60), run_name=keys.name, server=self.world.url)

    def causes(self) -> list[str]:
        return [cause.name for cause in self.view().causes]

    def first(self) -> tuple[str, str]:
        """(the cause to look at, the verdict)"""
        view = self.view()
        return view.causes[0].name if view.causes else "", view.verdict


async def healthy_run(world: RunWorld) -> Watched:
    """One that has trained a step, with answers in its stream and all its parts at work."""
    run = Watched(world)
    await world.train_steps(1)
    run.record()
    await world.answer_all()
    run.healthy()
    return run
