"""What a rank has trained, in the memory that it is copied to, in its file, and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from streamrl.learner.checkpoints.sealed import describe
from streamrl.learner.checkpoints.shard import Shard, load_state, load_weights
from streamrl.pinning import CudaRuntimeDouble, Pinned
from tests.conductor_world import ALONE
from tests.shards import write_shard


def test_a_shard_holds_the_state_of_its_copy_and_the_moments_once_there_are_some(tmp_path: Path) -> None:
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    shard = Shard(policy, optimizer, ALONE)
    for number in range(3):  # into the same memory
        before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        random = torch.get_rng_state()
        shard.take()
        make_a_step(policy, optimizer)
        [name] = shard.write(tmp_path)
        found = safetensors.torch.load_file(tmp_path / name)
        assert all(torch.equal(found[f"master/{name}"], tensor.flatten()) for name, tensor in before.items())
        assert torch.equal(found["rng"], random)
        assert ("exp_avg/weight" in found) is (number > 0)
        assert list(shard.write(tmp_path).values()) == [describe(tmp_path / name)]


@pytest.mark.parametrize("most_bytes", [1 << 62, 0], ids=["pinned", "refused"])
def test_beside_a_gpu_the_copys_memory_is_pinned_as_large_as_it_is(tmp_path: Path, most_bytes: int) -> None:
    """torch's own pinned memory would be rounded up to a power of two. Where it is refused, the copy is slower."""
    policy = nn.Linear(3, 200)
    optimizer = torch.optim.AdamW(policy.parameters())
    runtime = CudaRuntimeDouble(most_bytes=most_bytes)
    shard = Shard(policy, optimizer, ALONE, pinned=Pinned(runtime, runtime.launch))
    make_a_step(policy, optimizer)
    shard.take()
    [name] = shard.write(tmp_path)
    for_random_state = 1 << 14
    state_bytes = 12 * sum(parameter.numel() for parameter in policy.parameters())
    assert list(runtime.pinned.values()) == ([state_bytes + for_random_state] if most_bytes else [])
    assert torch.equal(safetensors.torch.load_file(tmp_path / name)["master/bias"], policy.bias)


def test_who_does_not_train_reads_the_weights_alone(tmp_path: Path) -> None:
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    make_a_step(policy, optimizer)
    write_shard(tmp_path, policy, optimizer, ALONE)
    torch.manual_seed(5)
    elsewhere, random = nn.Linear(3, 2), torch.get_rng_state()

    load_weights(tmp_path, elsewhere)

    assert all(torch.equal(*both) for both in zip(elsewhere.parameters(), policy.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_fused_optimizer_that_goes_on_counts_its_steps_beside_the_weights(
    tmp_path: Path, fused: bool, device: str
) -> None:
    """The kernel reads them there, and refuses a count on the host. `meta` stands for a GPU: that never ran."""
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    make_a_step(policy, optimizer)
    write_shard(tmp_path, policy, optimizer, ALONE)
    elsewhere = nn.Linear(3, 2, device="meta")
    its_own = torch.optim.AdamW(elsewhere.parameters(), fused=fused)

    load_state(tmp_path, elsewhere, its_own, ALONE)

    steps = [its_own.state[parameter]["step"] for parameter in elsewhere.parameters()]
    assert [step.device.type for step in steps] == [device, device]


def make_a_step(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    policy(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
