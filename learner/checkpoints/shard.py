"""A checkpoint's tensors: weights, optimizer and random state, one file per rank.

`train-00001-of-00002.safetensors` holds what rank 1 held: of each trained tensor its contiguous run of the flat fp32
master and of AdamW's two moments, with the run's start in the file's metadata. Restoring opens all files and copies
what overlaps its own runs, so the number of ranks may change, nothing is gathered, and nothing is a pickle. Frozen
parameters (the base under LoRA) are loaded from `model.path` again.

    masters, moments ─► one buffer, laid out as the file will be ─► (beside the loop) header, buffer ─► disk

The loop waits only for the first arrow. The buffer holds all that this rank trains, 12 bytes a weight, and is allocated
at start, so that lack of memory shows at once and the first copy finds its pages mapped. With a GPU all of it is
pinned, so that copies run at bus speed, asynchronously.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from torch import nn

from streamrl.errors import DataError
from streamrl.learner.checkpoints.save import write_parts
from streamrl.learner.checkpoints.sealed import Files
from streamrl.learner.parallel.dtensors import LocalRows, held, reported
from streamrl.learner.process.ranks import World
from streamrl.pinning import Pinned
from streamrl.safetensors_header import NAMES, Entry, pack_header

_PATTERN = "train-*-of-*.safetensors"
_RNG = "rng"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RNG_BYTES = 1 << 14  # room for torch's state on a CPU (5,056 bytes) and on a GPU (16)
_PART_BYTES = 1 << 22
_NAMES: Final = {getattr(torch, name): NAMES[name] for name in ("float32", "float64", "uint8")}


class Shard:
    """This rank's part of a checkpoint. Each copy must be written before the next is taken."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, pinned: Pinned | None = None
    ) -> None:
        """`pinned` defaults to that of the device, if it is a GPU."""
        self._policy, self._optimizer, self._world = policy, optimizer, world
        reported_bytes = sum(reported(p, shape=p.shape).values.nbytes for _, p in _trained(policy))
        num_bytes = (1 + len(_MOMENTS)) * reported_bytes + _RNG_BYTES
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8).zero_()
        if pinned is None and world.device.type == "cuda":
            pinned = Pinned(torch.cuda.cudart(), lambda: torch.ones(1, device=world.device))
        if pinned is not None:
            pinned.hold(self._buffer)
        self._header, self._num_bytes = b"", 0

    def take(self) -> None:
        """Copy the current state."""
        metadata: dict[str, dict[str, float]] = {"starts": {}, "steps": {}}
        layout: dict[str, Entry] = {}
        self._num_bytes = 0
        for name, parameter in _trained(self._policy):
            state = self._optimizer.state.get(parameter, {})
            metadata["steps"][name] = float(state["step"]) if state else 0.0
            for kind, tensor in [("master", parameter), *((moment, state[moment]) for moment in _MOMENTS if state)]:
                run = reported(tensor, shape=parameter.shape)
                metadata["starts"][name] = run.start
                layout[f"{kind}/{name}"] = self._place(run.values)
        layout[_RNG] = self._place(torch.get_rng_state())
        if self._world.device.type == "cuda":
            layout[f"{_RNG}/cuda"] = self._place(torch.cuda.get_rng_state())
            torch.cuda.synchronize()
        self._header = pack_header(layout, metadata={kind: json.dumps(of) for kind, of in metadata.items()})

    def write(self, folder: Path) -> Files:
        """Write the copy durably."""
        path = folder / f"train-{self._world.rank:05d}-of-{self._world.size:05d}.safetensors"
        return {path.name: write_parts(path, self._parts())}

    def _place(self, values: torch.Tensor) -> Entry:
        """Append the values to the buffer; return their header entry."""
        begin, self._num_bytes = self._num_bytes, self._num_bytes + values.nbytes
        self._buffer[begin : self._num_bytes].view(values.dtype).copy_(values, non_blocking=True)
        return Entry(dtype=_NAMES[values.dtype], shape=tuple(values.shape), begin=begin, end=self._num_bytes)

    def _parts(self) -> Iterable[memoryview]:
        yield memoryview(self._header)
        whole = self._buffer.numpy().data
        for begin in range(0, self._num_bytes, _PART_BYTES):
            yield whole[begin : min(begin + _PART_BYTES, self._num_bytes)]


def load_state(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Restore the state from shards written by any number of ranks."""
    counts_beside_weights = bool(optimizer.defaults.get("fused"))  # required by the fused kernel
    with _opened(folder) as files:
        _refuse_others(files, policy)
        for name, parameter in _trained(policy):
            _fill(held(parameter, shape=parameter.shape), files, f"master/{name}", name)
            steps = max((file.steps.get(name, 0.0) for file in files), default=0.0)
            if steps > 0:
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(steps, device=parameter.device if counts_beside_weights else "cpu")
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    _fill(held(state[moment], shape=parameter.shape), files, f"{moment}/{name}", name)
        if world.rank < len(files):
            _restore_rng(files[world.rank].opened, world)


def load_weights(folder: Path, policy: nn.Module) -> None:
    """Restore only the masters, for inference: moments would take twice as much memory again."""
    with _opened(folder) as files:
        if not files:
            raise DataError(f"{folder} is gone: its run has removed it meanwhile (checkpoint.keep_last)")
        _refuse_others(files, policy)
        for name, parameter in _trained(policy):
            _fill(held(parameter, shape=parameter.shape), files, f"master/{name}", name)


@contextmanager
def _opened(folder: Path) -> Iterator[list[_File]]:
    with ExitStack() as stack:
        paths = sorted(folder.glob(_PATTERN))
        yield [_File.open(stack.enter_context(safetensors.safe_open(path, framework="pt"))) for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    opened: Any  # a safetensors file
    names: frozenset[str]
    starts: dict[str, int]
    steps: dict[str, float]

    @classmethod
    def open(cls, opened: Any) -> _File:
        metadata = opened.metadata()
        starts, steps = json.loads(metadata["starts"]), json.loads(metadata["steps"])
        return cls(opened=opened, names=frozenset(opened.keys()), starts=starts, steps=steps)


def _refuse_others(files: list[_File], policy: nn.Module) -> None:
    """Raise DataError if the files hold other tensors than are trained, or larger or smaller ones: runs of the flat
    tensor would fit, and be other numbers."""
    sizes: dict[str, int] = {}
    for file in files:
        for name, start in file.starts.items():
            end = start + file.opened.get_slice(f"master/{name}").get_shape()[0]
            sizes[name] = max(sizes.get(name, 0), end)
    trained = {name: parameter.numel() for name, parameter in _trained(policy)}
    if differing := {name for name in sizes.keys() | trained.keys() if sizes.get(name) != trained.get(name)}:
        name = min(differing)
        raise DataError(
            f"the checkpoint holds {sizes.get(name, 0)} weights of {name}, but {trained.get(name, 0)} are trained: "
            "`model` must be the one that it was made with, also its lora and its router"
        )


def _fill(run: LocalRows, files: list[_File], key: str, name: str) -> None:
    """Copy the overlap of every file into the run; together they must cover it."""
    begin, end = run.start, run.start + len(run.values)
    filled = 0
    for file in files:
        if key not in file.names:
            continue
        piece = file.opened.get_slice(key)
        start = file.starts[name]
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
