"""A host copy of the weights in their published dtype, which is encoded while the optimizer continues.

Of a publish, the loop waits only for this copy and a little more. It is made in parts, so that the first is encoded
while the next is copied. There is memory for two copies: the last announced one stays, since the next is encoded
against it, and the other is overwritten.

    take ─► one half ─► encoded against the other ─► announced: keep ─► take ─► the other half ─► ...
                                                 └─► failed ─► take ─► the same half again

Every version is checked, without a forward pass: its bytes must be the cast of this step's masters.

    masters ─┬─► the host copy ─► encoded: a digest of each range ─┐ beside the loop
             └─► cast once more, by itself ─► digests ─────────────┴─ equal, or nothing is announced

Workers would faithfully serve a copy that was not refreshed or is of another step, since their checks begin with the
published bytes. The loop waits for this second cast about as long as for the copy (135M parameters in bf16: 45 ms on
one core). On a GPU the second cast stays there, and its sum is compared (`copiers`).
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
from streamrl.learner.parallel.dtensors import LocalRows, reported
from streamrl.learner.publishing.copiers import Check, Copier
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, Coding, DType, HeldRange, RangeRecord

_PART_BYTES = 8 << 20  # or one range, if larger
_ALIGN = 64

_Run = tuple[str, LocalRows, torch.Tensor]  # name, this rank's rows, their place in the buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of this rank's ranges, on the host."""

    ranges: list[HeldRange]
    check: Check  # verifies that they are the cast of their source, if the copier can


class HostCopy:
    def __init__(self, dtype: DType, copier: Copier) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._integers = torch.int32 if self._dtype == torch.float32 else torch.int16
        self._copier = copier
        self._buffer = torch.empty(0, dtype=self._dtype)  # [2 * num_elements] two halves, with all runs of this rank
        self._slots: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # per half: its slots, one per run
        self._taken = 0  # the half that is written to

    def take(self, model: nn.Module) -> Iterator[Part]:
        """Yield everything that this rank publishes, some tensors at a time."""
        runs = [(name, reported(tensor, shape=tensor.shape)) for name, tensor in published_parameters(model)]
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
        """Keep the last copy, which was announced, until the next call."""
        self._taken = 1 - self._taken

    def _places(self, lengths: list[int]) -> list[torch.Tensor]:
        """Return slots for runs of these lengths, aligned to 64 bytes; the same slots while the lengths stay equal."""
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
    """Cut as the encoder does, so that it need not wait for all of a large tensor."""
    name, rows, slot = run
    for begin in range(0, len(slot), MAX_RANGE_ELEMENTS):
        values = rows.values[begin : begin + MAX_RANGE_ELEMENTS]
        yield name, LocalRows(start=rows.start + begin, values=values), slot[begin : begin + MAX_RANGE_ELEMENTS]


_CAST_ELEMENTS = 1 << 19  # at a time: digested while they are in the CPU's cache

CastDigests = Mapping[tuple[str, int], bytes]  # by (tensor, start) of each range that this rank holds


def cast_digests(model: nn.Module, dtype: DType) -> CastDigests:
    """Digest a separate cast of all that this rank publishes, in the encoder's ranges."""
    parts = digests_of(published_parameters(model), dtype, Coding.RAW)
    return {(part.tensor, part.start): part.digest for part in parts}


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: DType, coding: Coding) -> Iterator[RangeRecord]:
    """Digest what this rank holds of the tensors, as ranges without bytes."""
    for name, tensor in tensors:
        run = reported(tensor, shape=tensor.shape)
        for begin in range(0, len(run.values), MAX_RANGE_ELEMENTS):
            values = run.values[begin : begin + MAX_RANGE_ELEMENTS]
            digest = _digest(values, getattr(torch, dtype))
            yield RangeRecord(name, run.start + begin, len(values), coding, 0, 0, digest)


def _digest(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    digest = xxhash.xxh3_128()
    for part in values.split(_CAST_ELEMENTS):
        digest.update(part.to(dtype).cpu().view(torch.uint8).numpy().data)
    return digest.digest()


def refuse_other_bytes(encoded: Iterable[RangeRecord], cast: CastDigests) -> None:
    """Raise WeightsError for encoded ranges that differ from the cast of the masters."""
    others = [part for part in encoded if cast.get((part.tensor, part.start)) != part.digest]
    if others:
        raise WeightsError(
            f"{len(others)} ranges to be published are not the cast of this step's weights, "
            f"the first {others[0].tensor} from element {others[0].start}"
        )
