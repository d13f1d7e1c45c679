"""What a worker does when its engine dies, or does not serve what it was told to load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from streamrl.errors import EngineError, LoadRejected
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Engine
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rollout.roles import WorkDouble
from streamrl.workers.supervise import RestartPatience, Supervisor
from streamrl.workers.weights.roles import WeightsDouble
from tests.helpers import wait_until_async

Outcome = Callable[[WeightsDouble], Exception | None]


def rejected(weights: WeightsDouble) -> Exception:
    return LoadRejected("the canary is off")


def rejected_after_a_proof(weights: WeightsDouble) -> Exception:
    weights.num_proved += 1
    return LoadRejected("the canary is off")


def died(weights: WeightsDouble) -> Exception:
    return EngineError("out of memory")


class Scene:
    def __init__(
        self, *outcomes: Outcome, rejected_s: float = 10.0, spread_s: float = 0.01, after_term: int | None = None
    ) -> None:
        self.weights = WeightsDouble()
        self.work = WorkDouble(*(partial(outcome, self.weights) for outcome in outcomes))
        self.made: list[EngineDouble] = []
        self.progress = Progress(part="worker/0", role="worker")
        self.supervisor = Supervisor(
            rollout=self.work,
            weights=self.weights,
            make_engine=self._make,
            progress=self.progress,
            patience=RestartPatience(first_pause_s=0.001, spread_s=spread_s, rejected_s=rejected_s),
            after_term=after_term,
        )
        self.stop = asyncio.Event()

    def _make(self) -> Engine:
        self.made.append(EngineDouble())
        return self.made[-1]

    async def run(self) -> None:
        await asyncio.wait_for(self.supervisor.run(self.stop), 10)

    async def waits_after(self, num_runs: int) -> None:
        """For weights."""

        async def waits() -> bool:
            return len(self.work.engines) == num_runs and self.progress.report().doing == "weights"

        await wait_until_async(waits, description="the worker waits for other weights")


async def test_an_engine_that_dies_is_stopped_and_another_one_takes_its_place() -> None:
    scene = Scene(died)
    await scene.run()
    assert [engine.stopped for engine in scene.made] == [True, True]
    assert scene.work.engines == scene.made
    assert scene.progress.report().detail["engine_restarts"] == 1


@pytest.mark.parametrize("told", ["newer", "stop"])
async def test_beside_a_learner_the_first_engine_is_made_when_that_has_announced_its_weights(told: str) -> None:
    scene = Scene(died, after_term=1)
    task = asyncio.create_task(scene.run())
    await scene.waits_after(0)
    assert not scene.made
    (scene.weights.newer if told == "newer" else scene.stop).set()
    await task
    assert len(scene.made) == (2 if told == "newer" else 0), "the second waits for nobody"


async def test_engines_that_die_one_after_the_other_end_the_worker_and_the_error_says_why() -> None:
    scene = Scene(died, died, died)
    with pytest.raises(EngineError, match=r"3 times in a row.*out of memory"):
        await scene.run()
    assert all(engine.stopped for engine in scene.made)


async def test_an_engine_that_delivered_before_it_died_begins_the_count_anew() -> None:
    def delivered_then_died(weights: WeightsDouble) -> Exception:
        scene.work.counts.groups_delivered += 1
        return EngineError("out of memory")

    scene = Scene(*[delivered_then_died] * 5)
    await scene.run()
    assert len(scene.made) == 6


async def test_a_refused_load_is_tried_with_weights_fetched_anew() -> None:
    scene = Scene(rejected)
    await scene.run()
    assert scene.weights.num_distrusted == 1
    assert len(scene.made) == 1


async def test_a_load_refused_twice_is_tried_with_another_engine() -> None:
    scene = Scene(rejected, rejected)
    await scene.run()
    assert scene.weights.num_distrusted == 2
    assert scene.work.engines == [scene.made[0], scene.made[0], scene.made[1]]
    assert scene.made[0].stopped


async def test_refused_by_another_engine_too_nothing_is_made_before_a_newer_version() -> None:
    scene = Scene(rejected, rejected, rejected)
    task = asyncio.create_task(scene.run())

    await scene.waits_after(3)
    scene.weights.newer.set()
    await task
    assert len(scene.work.engines) == 4
    assert len(scene.made) == 2


async def test_without_a_newer_version_the_worker_ends_and_says_what_was_refused() -> None:
    scene = Scene(rejected, rejected, rejected, rejected_s=0.05)
    with pytest.raises(LoadRejected, match=r"weights\.give_up_after_s.*the canary is off"):
        await scene.run()


async def test_a_version_proved_in_between_begins_the_count_of_refusals_anew() -> None:
    scene = Scene(*[rejected_after_a_proof] * 4)
    await scene.run()
    assert len(scene.made) == 1


async def test_a_word_to_stop_ends_the_wait_for_other_weights() -> None:
    scene = Scene(rejected, rejected, rejected)
    task = asyncio.create_task(scene.run())

    await scene.waits_after(3)
    scene.stop.set()
    await task
    assert len(scene.work.engines) == 3


async def test_a_newer_version_that_comes_before_another_engine_is_tried_with_the_old_one() -> None:
    scene = Scene(rejected, rejected, spread_s=3600.0, rejected_s=7200.0)
    task = asyncio.create_task(scene.run())
    await scene.waits_after(2)
    scene.weights.newer.set()
    await task
    assert len(scene.work.engines) == 3
    assert len(scene.made) == 1


async def test_newer_versions_do_not_put_off_another_engine_for_ever() -> None:
    scene = Scene(*[rejected] * 50, spread_s=0.05)

    async def announce_for_ever() -> None:
        while True:
            scene.weights.newer.set()
            await asyncio.sleep(0.002)

    announcing = asyncio.create_task(announce_for_ever())
    await scene.run()
    announcing.cancel()
    assert len(scene.made) == 2
    assert [engine is scene.made[1] for engine in scene.work.engines].index(True) < 50


async def test_a_word_to_stop_ends_the_wait_for_another_engine_and_none_is_started() -> None:
    scene = Scene(rejected, rejected, spread_s=3600.0, rejected_s=7200.0)
    task = asyncio.create_task(scene.run())
    await scene.waits_after(2)
    scene.stop.set()
    await task
    assert len(scene.made) == 1


async def test_a_fleet_that_rejects_one_version_does_not_start_its_engines_at_one_moment() -> None:
    spread_s = 1.0
    scenes = [Scene(rejected, rejected, spread_s=spread_s) for _ in range(50)]
    starts: list[float] = []

    async def run(scene: Scene) -> None:
        await scene.run()
        starts.append(asyncio.get_running_loop().time())

    await asyncio.gather(*map(run, scenes))
    assert all(len(scene.made) == 2 for scene in scenes)
    assert max(starts) - min(starts) > spread_s / 4, "all within a quarter by chance: one in 10^27"
