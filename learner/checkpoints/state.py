"""A checkpoint's heavy half: weights, optimizer and random state, one file a rank.

`train-00001-of-00002.safetensors` holds what rank 1 held: of each trained tensor its run of the flat fp32 master and of
AdamW's two moments, with the run's start in the file's metadata. Whoever restores opens all files and takes what falls
into its own runs, so the number of ranks may change, nothing is gathered, and nothing is a pickle. What does not
train (the base under LoRA) comes from `model.path` again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from learner.distributed import World
from learner.policy.tensors import Held, held
from streamrl.errors import DataError

_PATTERN = "train-*-of-*.safetensors"
_RNG = "rng"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Path:
    """This rank's file; the folder becomes a checkpoint only when rank 0 commits it."""
    tensors: dict[str, torch.Tensor] = {_RNG: torch.get_rng_state()}
    starts: dict[str, int] = {}
    steps: dict[str, float] = {}
    for name, parameter in _trained(policy):
        state = optimizer.state.get(parameter, {})
        steps[name] = float(state["step"]) if state else 0.0
        for kind, tensor in [("master", parameter), *((moment, state[moment]) for moment in _MOMENTS if state)]:
            run = held(tensor, shape=parameter.shape)
            starts[name] = run.start
            tensors[f"{kind}/{name}"] = run.values.cpu()
    if world.device.type == "cuda":
        tensors[f"{_RNG}/cuda"] = torch.cuda.get_rng_state()
    metadata = {"starts": json.dumps(starts), "steps": json.dumps(steps)}
    path = folder / f"train-{world.rank:05d}-of-{world.size:05d}.safetensors"
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def load_state(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """The inverse, at any number of ranks."""
    with ExitStack() as stack:
        paths = sorted(folder.glob(_PATTERN))
        shards = [_Shard.open(stack.enter_context(safetensors.safe_open(path, framework="pt"))) for path in paths]
        for name, parameter in _trained(policy):
            _fill(held(parameter, shape=parameter.shape), shards, f"master/{name}", name)
            steps = max((shard.steps.get(name, 0.0) for shard in shards), default=0.0)
            if steps > 0:
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(steps)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    _fill(held(state[moment], shape=parameter.shape), shards, f"{moment}/{name}", name)
        if world.rank < len(shards):
            _restore_rng(shards[world.rank].file, world)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    file: Any  # an open safetensors file
    names: frozenset[str]
    starts: dict[str, int]
    steps: dict[str, float]

    @classmethod
    def open(cls, file: Any) -> _Shard:
        metadata = file.metadata()
        starts, steps = json.loads(metadata["starts"]), json.loads(metadata["steps"])
        return cls(file=file, names=frozenset(file.keys()), starts=starts, steps=steps)


def _fill(run: Held, shards: list[_Shard], key: str, name: str) -> None:
    """Copy into the run whatever the files hold of it; all of it must be there."""
    begin, end = run.start, run.start + len(run.values)
    filled = 0
    for shard in shards:
        if key not in shard.names:
            continue
        piece = shard.file.get_slice(key)
        start = shard.starts[name]
        low, high = max(begin, start), min(end, start + piece.get_shape()[0])
        if low < high:
            run.values[low - begin : high - begin].copy_(piece[low - start : high - start])
            filled += high - low
    if filled != len(run.values):
        raise DataError(f"the checkpoint does not hold all of {key}: is `model` the one that it was made with?")


def _restore_rng(file: Any, world: World) -> None:
    torch.set_rng_state(file.get_tensor(_RNG))
    if world.device.type == "cuda" and f"{_RNG}/cuda" in file.keys():  # noqa: SIM118 - not a dict
        torch.cuda.set_rng_state(file.get_tensor(f"{_RNG}/cuda"))


def _trained(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in policy.named_parameters() if p.requires_grad)
