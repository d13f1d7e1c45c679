"""What ranks of any layout do in tests: steps from a checkpoint to the next, versions of given weights; and what both
must come to."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from torch import nn

from streamrl.config import schema
from streamrl.learner.checkpoints.shard import load_state
from streamrl.learner.model.policy import Policy
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.process.ranks import World
from streamrl.protocol.weights.file_store import FileStore
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from tests.integration.learner_ranks import keep, publisher
from tests.publish_world import publish
from tests.shards import write_shard

NUM_STEPS = 3  # from a checkpoint to the next


class Rank(Protocol):
    """With its part of the model."""

    config: schema.Config
    world: World
    policy: Policy
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> None: ...


def state_of(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole, on every rank."""
    found = {f"master/{name}": whole(p).clone() for name, p in policy.named_parameters()}
    for name, parameter in policy.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                found[f"{moment}/{name}"] = whole(optimizer.state[parameter][moment]).clone()
    return found


def go_on(rank: Rank, folder: Path) -> None:
    """From where twice as many ranks stopped, if they have; the second third, and the state before and after."""
    before, size = folder / f"checkpoint-{2 * rank.world.size}", rank.world.size
    first = NUM_STEPS if before.exists() else 0
    if first:
        _restore(rank, before)
        keep(state_of(rank.policy, rank.optimizer), folder / f"restored-{size}.safetensors", rank.world)
    for number in range(first, first + NUM_STEPS):
        rank.step(number)
    save(rank, folder / f"checkpoint-{size}")
    keep(state_of(rank.policy, rank.optimizer), folder / f"left-{size}.safetensors", rank.world)


def save(rank: Rank, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rank.world.barrier()
    write_shard(folder, rank.policy, rank.optimizer, rank.world)
    rank.world.barrier()


def serve(rank: Rank, folder: Path, out: Path) -> None:
    """Two versions, of weights that one rank has left in `folder`."""
    out.mkdir(exist_ok=True)
    rank.world.barrier()
    background = BackgroundThread("publisher")
    with background.working(join_s=60):
        versions = publisher(rank, out, background)
        for step in (1, 2):
            _restore(rank, folder / f"weights-{step}")
            assert publish(versions, step) is not None


def _restore(rank: Rank, checkpoint: Path) -> None:
    load_state(checkpoint, rank.policy, rank.optimizer, rank.world)


def assert_restored(folder: Path, alone: Rank) -> None:
    """Bit for bit, by two ranks what four have left, and by one what two have."""
    left, restored = (safetensors.torch.load_file(folder / f"{name}.safetensors") for name in ("left-4", "restored-2"))
    _assert_same(restored, left)
    _restore(alone, folder / "checkpoint-2")
    left = safetensors.torch.load_file(folder / "left-2.safetensors")
    _assert_same(state_of(alone.policy, alone.optimizer), left)


def assert_parts_make_the_whole(folder: Path, whole: Rank, last: Rank) -> None:
    """Steps of four ranks, then of two, then of one, and all of them by one."""
    for number in range(3 * NUM_STEPS):
        whole.step(number)
    _restore(last, folder / "checkpoint-2")
    for number in range(2 * NUM_STEPS, 3 * NUM_STEPS):
        last.step(number)
    ours, theirs = (state_of(rank.policy, rank.optimizer) for rank in (last, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def assert_served_alike(one: Path, more: Path, mirrors: Path) -> None:
    """Each version bit for bit; and the second is another than the first."""
    alone, together = _served(one, mirrors), _served(more, mirrors)
    for ours, theirs in zip(together, alone, strict=True):
        _assert_same(ours, theirs)
    assert any(not torch.equal(tensor, alone[1][name]) for name, tensor in alone[0].items())


def _served(out: Path, mirrors: Path) -> list[dict[str, torch.Tensor]]:
    """What a worker has of each version; the second is a delta."""
    paths = sorted(out.glob("manifest-*"), key=lambda path: int(path.name.split("-")[1]))
    versions = [decode_manifest(path.read_bytes()) for path in paths]
    assert versions[1].base == versions[0].version
    mirror, found = Mirror(mirrors / out.name), []
    for manifest in versions:
        mirror.apply(manifest, FileStore(out / "blobs"))
        found.append({name: tensor.clone() for name, tensor in safetensors.torch.load_file(mirror.path).items()})
    return found


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
