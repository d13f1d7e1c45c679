"""Which elements of a mirror have changed since a version: what an engine that serves it has to write, and no more.

    patch ─► positions, tensor by tensor ─► Changed: positions, and the bits that are there now ─► engine

It says where, and never what: the bits are read out of the mirror, stretch by stretch as each is proved, so a position
too many does no harm. Nothing is known after an anchor, after a failure and of merged adapters: then all of it may have
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.protocol.weights.format import Bits

# Of a tensor's elements: beyond it is faster written as a whole (one element costs as much as some forty in a row).
_MOST = 1 / 32

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    positions: Positions  # [n] in the flat tensor; one may come more than once
    bits: Bits  # [n] what is there now


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    since: int  # the version
    elements: Mapping[str, Elements]  # by tensor
    whole: tuple[str, ...]  # tensors much of which may have changed


class ChangeLog:
    """One per mirror. Several threads may note at once, and read, each of stretches of its own."""

    def __init__(self) -> None:
        self._since = 0  # 0: nothing is known
        self._positions: dict[str, dict[int, list[Positions]]] = {}  # by tensor and the stretch that was patched
        self._num_noted: dict[str, int] = {}
        self._bits: dict[tuple[str, int], Bits] = {}  # likewise, of stretches that were read since the last patch
        self._whole: set[str] = set()

    def begin(self, version: int) -> None:
        """Somebody has all of this version."""
        self._since, self._positions, self._whole = version, {}, set()
        self._num_noted, self._bits = {}, {}

    def lose(self) -> None:
        self.begin(0)

    def going_on(self) -> None:
        """The mirror is patched further: what was read is old."""
        self._bits = {}

    def note(self, tensor: str, positions: Positions, *, start: int, num_elements: int) -> None:
        """`start`: of the stretch that was patched."""
        if not self._since or tensor in self._whole:
            return
        self._positions.setdefault(tensor, {}).setdefault(start, []).append(positions)
        self._num_noted[tensor] = self._num_noted.get(tensor, 0) + len(positions)
        if self._num_noted[tensor] > _MOST * num_elements:
            self.note_whole(tensor)

    def note_whole(self, tensor: str) -> None:
        self._whole.add(tensor)
        self._positions.pop(tensor, None)

    def read(self, tensor: str, start: int, elements: Bits) -> None:
        """A stretch of this tensor, which holds `elements`, was proved: it is read while the cache has it."""
        noted = self._positions.get(tensor, {}).get(start)
        if noted:
            self._bits[tensor, start] = elements[_joined(noted)]

    def changed(self, views: Mapping[str, Bits], *, since: int) -> Changed | None:
        """None: all of it may have."""
        if not since or since != self._since:
            return None
        elements = {}
        for tensor, stretches in self._positions.items():
            if tensor not in self._whole:
                positions = {start: _joined(noted) for start, noted in stretches.items()}
                bits = [
                    self._bits[tensor, start] if (tensor, start) in self._bits else views[tensor][positions[start]]
                    for start in positions
                ]
                elements[tensor] = Elements(positions=_joined([*positions.values()]), bits=_joined(bits))
        return Changed(since=since, elements=elements, whole=tuple(sorted(self._whole)))


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
