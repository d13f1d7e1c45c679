"""Which process of a run gets which GPUs: apart wherever that can be, and together only with memory that adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.check import check_config
from streamrl.config.placement import GpuShare, Placement, place
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, ResourceError
from streamrl.gpus import Gpu
from streamrl.ops.launch.parts import RunFolder, learner_command, reward_command, worker_command
from streamrl.ops.launch.processes import Command
from tests.gpus_world import made_up

REWARD = {"model": "reward"}


def make_config(*, ranks: int = 1, workers: int = 1, reward: bool = False, **changes: Any) -> Config:
    fields: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
        "reward_server": REWARD if reward else None,
        "learner": {"processes": ranks, **changes.get("learner", {})},
        "worker": {"count": workers, **changes.get("worker", {})},
        "validation": {"every_steps": 0},
    }
    return Config.model_validate(fields)


def on(placement: Placement) -> dict[str, list[str]]:
    return {part: [gpu.name for gpu in share.gpus] for part, share in placement.shares.items()}


def assert_apart_or_adding_up(placement: Placement, gpus: Sequence[Gpu]) -> None:
    for (one, first), (other, second) in combinations(placement.shares.items(), 2):
        together = set(first.gpus) & set(second.gpus)
        assert not together or (first.fraction and second.fraction), (one, other)
    for gpu in gpus:
        fractions = [share.fraction for share in placement.shares.values() if gpu in share.gpus and share.fraction]
        assert sum(fractions) <= 0.9 + 1e-9, gpu


def test_without_gpus_nothing_is_set() -> None:
    placement = place(make_config(ranks=2, workers=2, reward=True), ())
    assert placement.shares == {}
    assert placement.environment("learner") == {}


def test_where_there_are_enough_nobody_shares() -> None:
    config = make_config(ranks=4, workers=3, reward=True)
    placement = place(config, made_up(8))
    assert on(placement) == {
        "learner": ["0", "1", "2", "3"],
        "worker/0": ["4"],
        "worker/1": ["5"],
        "worker/2": ["6"],
        "reward/0": ["7"],
    }
    assert all(share.fraction is None for share in placement.shares.values())


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("reward", [False, True])
def test_whatever_is_placed_is_apart_or_adds_up(count: int, ranks: int, workers: int, reward: bool) -> None:
    config, gpus = make_config(ranks=ranks, workers=workers, reward=reward), made_up(count)
    if ranks > count:
        with pytest.raises(ResourceError, match=rf"learner\.processes = {ranks}: .*set it to {count}"):
            place(config, gpus)
        return
    placement = place(config, gpus)
    assert_apart_or_adding_up(placement, gpus)
    assert len(on(placement)["learner"]) == ranks
    assert len(placement.shares) == 1 + workers + reward
    if ranks + workers + reward <= count:
        assert all(share.fraction is None for share in placement.shares.values())
        assert len(placement.idle) == count - ranks - workers - reward


def test_one_gpu_is_shared_by_all() -> None:
    placement = place(make_config(reward=True), made_up(1))
    assert {part: (names, round(placement.fraction(part) or 0, 2)) for part, names in on(placement).items()} == {
        "learner": (["0"], 0.5),
        "worker/0": (["0"], 0.3),
        "reward/0": (["0"], 0.1),
    }


def test_a_reward_server_without_a_gpu_of_its_own_goes_beside_the_last_worker() -> None:
    placement = place(make_config(workers=2, reward=True), made_up(3))
    assert on(placement) == {"learner": ["0"], "worker/0": ["1"], "worker/1": ["2"], "reward/0": ["2"]}
    assert (placement.fraction("learner"), placement.fraction("worker/0")) == (None, None)
    assert placement.fraction("worker/1") == pytest.approx(0.8)


def test_a_users_share_of_the_memory_stands_and_the_learner_has_the_rest() -> None:
    config = make_config(worker={"engine_args": {"gpu_memory_utilization": 0.25}})
    placement = place(config, made_up(1))
    assert (placement.fraction("worker/0"), placement.fraction("learner")) == (0.25, pytest.approx(0.65))

    greedy = make_config(worker={"engine_args": {"gpu_memory_utilization": 0.92}})
    with pytest.raises(
        ResourceError, match=r"share GPU 0, .*= 0\.92 each leave too little of its memory; use at most 0\.40"
    ):
        place(greedy, made_up(1))
    assert place(greedy, made_up(2)).fraction("worker/0") is None


def test_tensor_parallel_workers_take_several_each() -> None:
    config = make_config(ranks=2, workers=3, worker={"engine_args": {"tensor_parallel_size": 2}})
    assert on(place(config, made_up(8))) == {
        "learner": ["0", "1"],
        "worker/0": ["2", "3"],
        "worker/1": ["4", "5"],
        "worker/2": ["6", "7"],
    }
    with pytest.raises(ResourceError, match=r"3 workers of 4 GPUs each need 12, there are 5 GPUs, .*leaves 3; .*fewer"):
        place(make_config(ranks=2, workers=3, worker={"gpus": 4}), made_up(5))


def test_a_number_is_a_demand() -> None:
    asked = make_config(ranks=1, workers=2, worker={"gpus": 1})
    assert on(place(asked, made_up(3)))["worker/1"] == ["2"]
    with pytest.raises(ResourceError, match=r"need 2, there are 2 GPUs, .* leaves 1; set worker\.count to 1"):
        place(asked, made_up(2))
    with pytest.raises(ResourceError, match=r"worker\.gpus = 1: torch finds no usable GPU here"):
        place(asked, ())
    alone = make_config(workers=1, learner={"gpus": 1})
    with pytest.raises(ResourceError, match=r"there is 1 GPU, and the learner leaves 0"):
        place(alone, made_up(1))
    with pytest.raises(ResourceError, match=r"learner\.gpus = 1: torch finds no usable GPU here"):
        place(alone, ())


def test_none_at_all_is_a_word_too() -> None:
    placement = place(make_config(learner={"gpus": 0}), made_up(1))
    assert on(placement) == {"learner": [], "worker/0": ["0"]}
    assert placement.environment("learner")["CUDA_VISIBLE_DEVICES"] == ""
    assert placement.fraction("worker/0") is None


def test_slices_of_a_gpu_are_one_a_process() -> None:
    slices = tuple(Gpu(name=f"MIG-{n}", memory=40 << 30) for n in range(3))
    assert on(place(make_config(workers=2), slices)) == {
        "learner": ["MIG-0"],
        "worker/0": ["MIG-1"],
        "worker/1": ["MIG-2"],
    }
    with pytest.raises(ResourceError, match=r"learner\.processes = 2: a process sees only one slice"):
        place(make_config(ranks=2), slices)
    with pytest.raises(ResourceError, match=r"worker\.gpus = 2: a process sees only one slice"):
        place(make_config(worker={"gpus": 2}), slices)


def test_on_a_machine_for_one_part_that_part_has_it() -> None:
    config = make_config(ranks=8, workers=8, reward=True)
    assert list(on(place(config, made_up(8), "learner"))) == ["learner"]
    assert on(place(config, made_up(1), "worker")) == {"worker/0": ["0"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 4, "learner": {"gpus": 2}}, r"learner\.gpus = 2: each rank uses one GPU: must be auto, 0 or .* = 4"),
        (
            {"worker": {"gpus": 4, "engine_args": {"tensor_parallel_size": 2}}},
            r"worker\.gpus = 4: .* over 2 GPUs; remove one",
        ),
        ({"worker": {"gpus": 3, "engine_args": {"pipeline_parallel_size": 2}}}, r"worker\.gpus = 3: .* over 2"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(make_config(**changes))


def commands(config: Config, gpus: Sequence[Gpu]) -> list[Command]:
    folder, placement = RunFolder(Path("runs/run")), place(config, gpus)
    found = [learner_command(config, folder, redis_url="unix:///s", placement=placement)]
    found += [
        worker_command(config, folder, number=number, redis_url="u", reward_url=None, placement=placement)
        for number in range(config.worker.count)
    ]
    if config.reward_server is not None:
        found.append(reward_command(config.reward_server, folder, port=0, placement=placement))
    return found


def test_each_process_is_told_what_it_may_see() -> None:
    started = commands(make_config(ranks=2, workers=2, reward=True), made_up(8))
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in started] == ["0,1", "2", "3", "4"]
    assert {one.environment["CUDA_DEVICE_ORDER"] for one in started} == {"PCI_BUS_ID"}
    assert not any("--gpu-memory" in one.arguments for one in started)


def test_processes_that_share_are_told_how_much() -> None:
    learner, worker = commands(make_config(), made_up(1))
    assert learner.arguments[learner.arguments.index("--gpu-memory") + 1] == "0.500"
    assert worker.arguments[worker.arguments.index("--gpu-memory") + 1] == "0.400"
    assert all("CUDA_VISIBLE_DEVICES" not in one.environment for one in commands(make_config(), ()))


def test_a_gpu_of_its_own_may_be_used_whole_and_should_not_be() -> None:
    """The learner's decision about its layers starts from the limit, so `doctor`'s must."""
    alone = GpuShare(gpus=(Gpu(name="0", memory=1000),))
    assert (alone.memory, alone.limit) == (900, 1000)
    shared = replace(alone, fraction=0.5)
    assert (shared.memory, shared.limit) == (500, 500)
