"""A worker on a run whose learner comes back with other settings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamrl.config.changes import is_read_by_workers
from streamrl.config.schema import Config
from streamrl.errors import RunGone
from streamrl.protocol.transport.types import RunInfo
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.follow_run import RunSettings, follow_run
from tests.pages import ROOT
from tests.worker_world import WorkerWorld, worker_config

OTHERS = {"validation": {"sampling": {"greedy": True, "max_tokens": 8}}}
ONLY_A_LEARNERS = {
    "optimizer": {"lr": 1e-3},
    "training": {"max_steps": 9},
    "validation": {"every_steps": 7},
    "weights": {"publish_every": 3, "anchor_share": 0.5},
    "worker": {"count": 5},
}


def taken_up(before: RunInfo, *, state: str = "running", **sections: Any) -> RunInfo:
    """The run of the next learner, with these settings changed."""
    values = Config.model_validate_json(before.config_json).model_dump(mode="json")
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    config = Config.model_validate(values)
    return replace(before, term=before.term + 1, config_json=config.model_dump_json(), state=state)


@pytest.mark.parametrize("setting", [OTHERS, {"worker": {"min_survivors": 3}}])
async def test_the_worker_leaves_a_run_that_a_learner_has_taken_up_with_other_settings(setting: dict[str, Any]) -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True))
    world.put(1)
    task = world.start()
    await world.until(lambda: len(world.engine.requests) == 2, "the samples are in flight")
    world.tickets.info = taken_up(world.info, **setting)
    await asyncio.wait_for(task, 60)
    assert world.tickets.handed_back == [1], "to a worker with the new settings"


async def test_the_worker_stays_if_only_a_learner_reads_what_has_changed() -> None:
    world = WorkerWorld()
    world.start()
    world.tickets.info = taken_up(world.info, **ONLY_A_LEARNERS)
    looks = world.tickets.num_looks
    await world.until(lambda: world.tickets.num_looks > looks + 1, "the worker has looked at the run again")
    world.put(1)
    await world.delivered(1)
    await world.finish()


class Run:
    """A double of the stream: what the worker finds, look by look; the last one stays."""

    def __init__(self, *found: RunInfo | None) -> None:
        self._found = list(found)

    async def run_info(self) -> RunInfo | None:
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]

    async def learner_report(self) -> bytes | None:
        return None


async def served(
    run: Run, *, each: Callable[[asyncio.Event], None] = lambda stop: None, seen: RunInfo | None = None
) -> list[int]:
    """The terms whose settings the worker has served, until it ended. `seen`: at its last look while it served."""
    terms, stop = [], asyncio.Event()

    async def serve(info: RunInfo, settings: RunSettings) -> None:
        assert settings.config.model_dump_json() == info.config_json
        terms.append(info.term)
        each(stop)
        if seen is not None:
            settings.differ_in(seen)

    progress = Progress(part="worker/0", role="worker")
    await asyncio.wait_for(follow_run(run, name="run", stop=stop, progress=progress, serve=serve), 60)
    return terms


FIRST = RunInfo(
    uid="uid", name="run", term=1, config_json=worker_config().model_dump_json(), fingerprint="f", state="running"
)
SECOND = taken_up(FIRST, **OTHERS)


@pytest.mark.parametrize(
    ("found", "terms"),
    [
        ([FIRST, SECOND, SECOND, replace(SECOND, state="finished")], [1, 2]),
        ([FIRST, taken_up(FIRST, **ONLY_A_LEARNERS)], [1]),  # it left for another reason
        ([FIRST, replace(FIRST, state="finished")], [1]),
        ([FIRST, taken_up(FIRST, state="stopped", **OTHERS)], [1]),
        ([FIRST, None], [1]),
    ],
)
async def test_it_begins_anew_with_the_settings_of_the_learner_that_has_the_run(
    found: list[RunInfo | None], terms: list[int]
) -> None:
    assert await served(Run(*found)) == terms


@pytest.mark.parametrize(
    ("found", "terms"),
    [
        ([None, None, replace(SECOND, term=3)], [1, 3]),  # Redis lost its data while the engine stopped
        ([replace(FIRST, term=3)], [1, 3]),  # the next learner has the first one's settings again
        ([replace(SECOND, state="finished")], [1]),
    ],
)
async def test_one_that_left_because_of_other_settings_begins_anew_whatever_it_finds_but_the_end(
    found: list[RunInfo | None], terms: list[int]
) -> None:
    finished = replace(SECOND, state="finished")
    assert await served(Run(FIRST, *found, found[-1], finished), seen=SECOND) == terms


async def test_one_that_is_told_to_stop_does_not_begin_anew() -> None:
    assert await served(Run(FIRST, SECOND), each=asyncio.Event.set) == [1]


async def test_a_run_that_is_removed_meanwhile_is_gone() -> None:
    class Removed(Run):
        async def run_info(self) -> RunInfo | None:
            if (found := await super().run_info()) is None:
                raise RunGone("the run was removed")
            return found

    with pytest.raises(RunGone):
        await served(Removed(FIRST, None))


# They say how long a worker waits for others, which those that it has begun with do as well.
PATIENCE = {"redis", "redis.give_up_after_s", "learner.idle_timeout_s"}
# Programs of their own, which follow no run; and configurations of vLLM.
OTHER_CONFIGURATIONS = {"evaluate.py", "eval_result.py", "preflight.py", "engines/vllm/loading/transfer.py"}


def test_every_setting_that_workers_read_is_one_that_they_follow() -> None:
    config = worker_config()
    settings = {*Config.model_fields}
    for name, section in config:
        settings |= {f"{name}.{key}" for key in getattr(type(section), "model_fields", ())}
    read: set[str] = set()
    workers = ROOT / "workers"
    for path in (*workers.rglob("*.py"), ROOT / "streamrl" / "config" / "logged.py"):
        if not path.is_relative_to(workers) or str(path.relative_to(workers)) not in OTHER_CONFIGURATIONS:
            read |= set(re.findall(r"config\.(\w+(?:\.\w+)?)", path.read_text())) & settings
    assert len(read) > 10
    assert {key for key in read - PATIENCE if not is_read_by_workers(key)} == set()
