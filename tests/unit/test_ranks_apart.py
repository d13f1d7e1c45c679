"""Ranks whose disks are not alike, on ranks that are not there: who has nothing to do there waits for who has."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamrl.config import schema
from streamrl.learner.checkpoints import export as exporting
from streamrl.learner.loading.load import load_policy
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.nowhere import nowhere
from tests.tiny_models import make_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(World):
    """One of two ranks; what it says to the other, in order."""

    said: list[str] = field(default_factory=list)

    def mesh(self) -> DeviceMesh:
        self.said.append("groups")
        return World.mesh(self)

    def barrier(self) -> None:
        self.said.append("barrier")

    def all_agree(self, mine: bool) -> bool:
        self.said.append("tried")
        return mine


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        raise AssertionError("the first rank writes")


@pytest.mark.parametrize("parts", [1, 4])
def test_a_rank_that_writes_nothing_gathers_no_more_than_so_much_ahead_of_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """On GPUs nothing else would hold it back: its gatherings would wait for a disk, and NCCL would give them up."""
    folder = make_model(tmp_path / "model")
    config = learner_config(folder, dir=tmp_path, weights=schema.Weights(dtype="float32"))
    with nowhere(2) as ranks:
        policy = load_policy(config, ranks, ())
        largest = max(parameter.numel() for parameter in policy.parameters()) * 4
        whole = sum(parameter.numel() for parameter in policy.parameters()) * 4
        monkeypatch.setattr(exporting, "_MAX_AHEAD_BYTES", whole // parts)
        second = Noted(rank=1, size=2, device=ranks.device)
        exporting.export(policy, NoTokenizer(), config, second)
    num_waits = second.said.count("barrier") - 1  # one is at the end
    assert whole // (whole // parts + largest) <= num_waits <= parts


@pytest.mark.parametrize("layout", [schema.Layout(replicas=2, tensor=2), schema.Layout(experts=4)])
def test_models_of_the_same_ranks_share_their_groups(layout: schema.Layout) -> None:
    """Each has memory of NCCL's, and a connection to each of its ranks."""

    def num_groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    def divide_a_model() -> None:
        for among in (world.mesh, world.expert_meshes, world.tensor_meshes):
            among()

    with nowhere(8) as ranks:
        world = ranks.under(layout)
        divide_a_model()
        before = num_groups()
        divide_a_model()
        assert num_groups() == before > 1


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        (schema.Layout(), ["groups"]),
        (schema.Layout(replicas=2), ["all have read", "groups"]),
    ],
)
def test_a_rank_waits_for_all_to_have_the_model_before_it_asks_them_anything(
    tmp_path: Path, layout: schema.Layout, first: list[str]
) -> None:
    """Asking has the time of a step, groups of some of the ranks that of torch, reading that of a disk or the hub."""
    folder = make_model(tmp_path / "model")
    with nowhere(2) as ranks:
        world = Noted(rank=0, size=2, device=ranks.device, layout=layout)
        config = learner_config(folder, learner=schema.Learner(layout=layout))
        load_policy(config, world, (), wait_for_readers=partial(world.said.append, "all have read"))
    asked = [*first, "all have read", "tried"]
    assert world.said[: len(asked)] == asked
    assert world.said.count("all have read") == asked.count("all have read")
