"""The elements of a mirror that changed since a version, so that an engine writes only those.

    patch ─► positions, tensor by tensor ─► Changed: positions, and the bits that are there now ─► engine

The log records positions, not values: the bits are read from the mirror, stretch by stretch as each is verified, so a
superfluous position does no harm. After an anchor, after a failure, and for merged adapters nothing is known: then any
element may have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.protocol.weights.format import Bits

# Share of a tensor's elements above which writing the whole tensor is faster (one scattered element costs as much as
# some forty in a row).
_MOST = 1 / 32

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    positions: Positions  # [n] in the flat tensor; may contain duplicates
    bits: Bits  # [n] the current bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    since: int  # the version
    elements: Mapping[str, Elements]  # by tensor
    whole: tuple[str, ...]  # tensors of which a large share may have changed


class ChangeLog:
    """The changes of one mirror. Several threads may call `note` and `read` at once, each for stretches of its own."""

    def __init__(self) -> None:
        self._since = 0  # 0: nothing is known
        self._positions: dict[str, dict[int, list[Positions]]] = {}  # by tensor and the stretch that was patched
        self._num_noted: dict[str, int] = {}
        self._bits: dict[tuple[str, int], Bits] = {}  # likewise, of stretches read since the last patch
        self._whole: set[str] = set()

    def begin(self, version: int) -> None:
        """Start logging: an engine holds all of this version."""
        self._since, self._positions, self._whole = version, {}, set()
        self._num_noted, self._bits = {}, {}

    def lose(self) -> None:
        self.begin(0)

    def going_on(self) -> None:
        """Drop the bits that were read: the mirror is about to be patched further."""
        self._bits = {}

    def note(self, tensor: str, positions: Positions, *, start: int, num_elements: int) -> None:
        """Record changed positions of the stretch that starts at `start`."""
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
        """Read the changed bits of a stretch that was just verified, while they are in the cache."""
        noted = self._positions.get(tensor, {}).get(start)
        if noted:
            self._bits[tensor, start] = elements[_joined(noted)]

    def changed(self, views: Mapping[str, Bits], *, since: int) -> Changed | None:
        """Return what changed since that version; None: anything may have."""
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
