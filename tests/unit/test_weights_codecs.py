"""Kernels are for large models, and numpy does the same where there are none."""

from __future__ import annotations

import sys

import numba
import pytest
from numba import types

from streamrl.protocol.weights import kernels
from streamrl.protocol.weights.kernels import Compiled
from streamrl.protocol.weights.sparse import Codec, Codecs, InPasses

LARGE = 64 << 20


def expecting(num_bytes: int) -> Codec:
    codecs = Codecs()
    codecs.expect(num_bytes)
    return codecs.get()


def test_deltas_of_a_large_model_alone_are_worth_compiling() -> None:
    assert isinstance(Codecs().get(), InPasses)
    assert isinstance(expecting(LARGE - 1), InPasses)
    assert isinstance(expecting(LARGE), Compiled)


def test_without_numba_passes_of_numpy_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streamrl.protocol.weights.kernels", None)

    assert isinstance(expecting(LARGE), InPasses)


@pytest.mark.parametrize("trouble", [RuntimeError("no locator available"), OSError(28, "No space left on device")])
def test_where_nothing_can_be_kept_on_disk_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    njit = numba.njit

    def without_disk(*args, **kwargs):
        if kwargs.get("cache"):
            raise trouble
        return njit(*args, **kwargs)

    monkeypatch.setattr(numba, "njit", without_disk)

    assert kernels.compiled(lambda number: number + 1, [types.int64(types.int64)])(2) == 3
