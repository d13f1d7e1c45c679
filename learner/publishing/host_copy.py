"""The weights as they will be served, copied to the host: what is encoded while the optimizer goes on.

The loop waits for this copy, and for little else of a publish. It comes in parts, so that the first is encoded while
the next is copied. The memory is used again for the next version, so a copy is to be encoded before the next is taken.

Are the bytes that go out the cast of this step's masters? Asked at every version, without a forward pass.

    masters ─┬─► the host copy ─► encoded: a digest of each range ─┐ beside the loop
             └─► cast once more, by itself ─► digests ─────────────┴─ equal, or nothing is announced

A copy that was not refreshed, or is of another step, would be served faithfully by every worker: their proofs begin at
what was published. The loop waits for this second cast, for about as long as for the copy (135M parameters in bf16:
45 ms on one core). On a GPU the cast is made there and its bits come to the host; that way was never run here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from streamrl.errors import WeightsError
from streamrl.learner.model.lora import published_parameters
from streamrl.learner.model.tensors import held
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, Coding, DType, HeldRange, RangeDigest, digest_of

_PART_BYTES = 8 << 20  # or a tensor that is larger


class HostCopy:
    def __init__(self, dtype: DType) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._integers = torch.int32 if self._dtype == torch.float32 else torch.int16
        self._buffers: dict[str, torch.Tensor] = {}  # [length] of the runs that this rank holds

    def take(self, model: nn.Module) -> Iterator[list[HeldRange]]:
        """All that this rank holds, some tensors at a time."""
        part: list[HeldRange] = []
        for name, parameter in published_parameters(model):
            run = held(parameter, shape=parameter.shape)
            if len(run.values):
                buffer = self._buffer(name, run.values)
                buffer.copy_(run.values)
                bits = buffer.view(self._integers).numpy()
                part.append(HeldRange(tensor=name, start=run.start, bits=bits.view(f"<u{bits.itemsize}")))
            if sum(one.bits.nbytes for one in part) >= _PART_BYTES:
                yield part
                part = []
        yield part

    def _buffer(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            # Pinned, a copy from a GPU goes at the speed of its bus.
            self._buffers[name] = torch.empty(len(values), dtype=self._dtype, pin_memory=values.is_cuda)
        return self._buffers[name]


_PART_ELEMENTS = 1 << 20  # cast at a time: they stay in the processor's cache

CastDigests = Mapping[tuple[str, int], bytes]  # by tensor and start of each range that this rank holds


def cast_digests(model: nn.Module, dtype: DType) -> CastDigests:
    """Of all that this rank holds and publishes, cut into ranges as the encoder cuts them."""
    parts = digests_of(published_parameters(model), dtype, Coding.RAW)
    return {(part.tensor, part.start): part.digest for part in parts}


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: DType, coding: Coding) -> Iterator[RangeDigest]:
    """Of what this rank holds of them, as ranges without bytes."""
    scratch = torch.empty(0)
    for name, tensor in tensors:
        run = held(tensor, shape=tensor.shape)
        if not len(scratch):
            scratch = torch.empty(MAX_RANGE_ELEMENTS, dtype=getattr(torch, dtype), pin_memory=run.values.is_cuda)
        for begin, values in zip(
            range(0, len(run.values), MAX_RANGE_ELEMENTS), run.values.split(MAX_RANGE_ELEMENTS), strict=True
        ):
            if len(values):
                digest = _digest(values, scratch[: len(values)])
                yield RangeDigest(name, run.start + begin, len(values), coding, 0, 0, digest)


def _digest(values: torch.Tensor, scratch: torch.Tensor) -> bytes:
    for source, target in zip(values.split(_PART_ELEMENTS), scratch.split(_PART_ELEMENTS), strict=True):
        target.copy_(source.to(scratch.dtype))
    return digest_of(scratch.view(torch.uint8).numpy().data)


def refuse_other_bytes(encoded: Iterable[RangeDigest], cast: CastDigests) -> None:
    """WeightsError where a range that was encoded is not what the masters cast to."""
    others = [part for part in encoded if cast.get((part.tensor, part.start)) != part.digest]
    if others:
        raise WeightsError(
            f"{len(others)} ranges that were to be published are not the cast of this step's weights, "
            f"{others[0].tensor} from element {others[0].start} for one"
        )
