"""The weights as they will be served, copied to the host: what is encoded while the optimizer goes on.

The loop waits for this copy, and for little else of a publish. It comes in parts, so that the first is encoded while
the next is copied. There is memory for two copies: the one that was announced last stays as it is, for the next is
encoded against it, and the other is written over.

    take ─► one half ─► encoded against the other ─► announced: keep ─► take ─► the other half ─► ...
                                                 └─► failed ─► take ─► the same half again

Are the bytes that go out the cast of this step's masters? Asked at every version, without a forward pass.

    masters ─┬─► the host copy ─► encoded: a digest of each range ─┐ beside the loop
             └─► cast once more, by itself ─► digests ─────────────┴─ equal, or nothing is announced

A copy that was not refreshed, or is of another step, would be served faithfully by every worker: their proofs begin at
what was published. The loop waits for this second cast, for about as long as for the copy (135M parameters in bf16:
45 ms on one core). On a GPU the second cast stays there, and its sum is compared (`copiers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import xxhash
from torch import nn

from streamrl.errors import WeightsError
from streamrl.learner.model.lora import published_parameters
from streamrl.learner.parallel.dtensors import LocalRows, told
from streamrl.learner.publishing.copiers import Check, Copier
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, Coding, DType, HeldRange, RangeDigest

_PART_BYTES = 8 << 20  # or a range that is larger
_ALIGN = 64

_Run = tuple[str, LocalRows, torch.Tensor]  # name, what this rank holds, where it goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of what this rank holds, on the host."""

    ranges: list[HeldRange]
    check: Check  # that they are the cast of what was copied, where the copier can say so


class HostCopy:
    def __init__(self, dtype: DType, copier: Copier) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._integers = torch.int32 if self._dtype == torch.float32 else torch.int16
        self._copier = copier
        self._buffer = torch.empty(0, dtype=self._dtype)  # [2 * num_elements] two halves, with all runs of this rank
        self._slots: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # in each of them, one after another
        self._taken = 0  # the half that is written to

    def take(self, model: nn.Module) -> Iterator[Part]:
        """All that this rank tells of, some tensors at a time."""
        runs = [(name, told(tensor, shape=tensor.shape)) for name, tensor in published_parameters(model)]
        runs = [(name, run) for name, run in runs if len(run.values)]
        slots = self._places([len(run.values) for _, run in runs])
        self._copier.begin(self._buffer)
        under_way = []
        for part in self._parts([(name, run, slot) for (name, run), slot in zip(runs, slots, strict=True)]):
            ready, check = self._copier.copy([(slot, run.values) for _, run, slot in part])
            under_way.append((part, ready, check))
        for part, ready, check in under_way:
            ready()
            yield Part(ranges=[self._range(name, run.start, slot) for name, run, slot in part], check=check)

    def keep(self) -> None:
        """What was taken last is announced: it stays until this is said of the next."""
        self._taken = 1 - self._taken

    def _places(self, lengths: list[int]) -> list[torch.Tensor]:
        """For runs of these lengths, each on a border of 64 bytes; the same ones as long as the lengths are."""
        if [len(slot) for slot in self._slots[0]] != lengths:
            step = _ALIGN // self._dtype.itemsize
            begins = [0, *accumulate(-(-length // step) * step for length in lengths)]
            self._buffer = torch.empty(2 * begins[-1], dtype=self._dtype)
            first, second = (
                [half[begin : begin + n] for begin, n in zip(begins, lengths, strict=False)]
                for half in (self._buffer[: begins[-1]], self._buffer[begins[-1] :])
            )
            self._slots = (first, second)
        return self._slots[self._taken]

    def _parts(self, runs: Sequence[_Run]) -> Iterator[list[_Run]]:
        part: list[_Run] = []
        for run in chain.from_iterable(map(_ranges, runs)):
            part.append(run)
            if sum(slot.nbytes for *_, slot in part) >= _PART_BYTES:
                yield part
                part = []
        yield part

    def _range(self, name: str, start: int, slot: torch.Tensor) -> HeldRange:
        bits = slot.view(self._integers).numpy()
        return HeldRange(tensor=name, start=start, bits=bits.view(f"<u{bits.itemsize}"))


def _ranges(run: _Run) -> Iterator[_Run]:
    """Cut as the encoder cuts it: it is not to wait for all of a large tensor."""
    name, rows, slot = run
    for begin in range(0, len(slot), MAX_RANGE_ELEMENTS):
        values = rows.values[begin : begin + MAX_RANGE_ELEMENTS]
        yield name, LocalRows(start=rows.start + begin, values=values), slot[begin : begin + MAX_RANGE_ELEMENTS]


_CAST_ELEMENTS = 1 << 19  # at a time: they are digested while the processor has them in its cache

CastDigests = Mapping[tuple[str, int], bytes]  # by tensor and start of each range that this rank holds


def cast_digests(model: nn.Module, dtype: DType) -> CastDigests:
    """Of all that this rank holds and publishes, cut into ranges as the encoder cuts them."""
    parts = digests_of(published_parameters(model), dtype, Coding.RAW)
    return {(part.tensor, part.start): part.digest for part in parts}


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: DType, coding: Coding) -> Iterator[RangeDigest]:
    """Of what this rank holds of them, as ranges without bytes."""
    for name, tensor in tensors:
        run = told(tensor, shape=tensor.shape)
        for begin in range(0, len(run.values), MAX_RANGE_ELEMENTS):
            values = run.values[begin : begin + MAX_RANGE_ELEMENTS]
            digest = _digest(values, getattr(torch, dtype))
            yield RangeDigest(name, run.start + begin, len(values), coding, 0, 0, digest)


def _digest(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    digest = xxhash.xxh3_128()
    for part in values.split(_CAST_ELEMENTS):
        digest.update(part.to(dtype).cpu().view(torch.uint8).numpy().data)
    return digest.digest()


def refuse_other_bytes(encoded: Iterable[RangeDigest], cast: CastDigests) -> None:
    """WeightsError where a range that was encoded is not what the masters cast to."""
    others = [part for part in encoded if cast.get((part.tensor, part.start)) != part.digest]
    if others:
        raise WeightsError(
            f"{len(others)} ranges that were to be published are not the cast of this step's weights, "
            f"{others[0].tensor} from element {others[0].start} for one"
        )
