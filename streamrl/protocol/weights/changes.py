"""Which elements of a mirror have changed since a version: what an engine that serves it has to write, and no more.

    patch ─► positions, tensor by tensor ─► Changed: positions, and the bits that are there now ─► engine

It says where, and never what: the bits are read out of the mirror once its digests are proved, so a position too many
does no harm. Nothing is known after an anchor, after a failure and of merged adapters: then all of it may have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """One per mirror. Several threads may note at once."""

    def __init__(self) -> None:
        self._since = 0  # 0: nothing is known
        self._positions: dict[str, list[Positions]] = {}
        self._whole: set[str] = set()

    def begin(self, version: int) -> None:
        """Somebody has all of this version."""
        self._since, self._positions, self._whole = version, {}, set()

    def lose(self) -> None:
        self.begin(0)

    def note(self, tensor: str, positions: Positions, *, num_elements: int) -> None:
        if not self._since or tensor in self._whole:
            return
        noted = self._positions.setdefault(tensor, [])
        noted.append(positions)
        if sum(map(len, noted)) > _MOST * num_elements:
            self.note_whole(tensor)

    def note_whole(self, tensor: str) -> None:
        self._whole.add(tensor)
        self._positions.pop(tensor, None)

    def changed(self, views: Mapping[str, Bits], *, since: int) -> Changed | None:
        """None: all of it may have."""
        if not since or since != self._since:
            return None
        elements = {}
        for tensor, noted in self._positions.items():
            if tensor not in self._whole:
                positions = np.concatenate(noted)
                elements[tensor] = Elements(positions=positions, bits=views[tensor][positions])
        return Changed(since=since, elements=elements, whole=tuple(sorted(self._whole)))
