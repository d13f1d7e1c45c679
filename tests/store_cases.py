"""What every blob store must do; called by the tests of each store."""

from __future__ import annotations

from functools import partial

import pytest

from streamrl.errors import WeightsError
from streamrl.protocol.weights.stores import BlobStore


def check_store(store: BlobStore) -> None:
    """Check that blobs can be read back and listed, are never overwritten, and can be deleted."""
    large = bytes(range(256)) * 1000
    blobs = {"u/000001/0-0-aa": large, "u/000001/1-0-bb": b"", "v/000001/0-0-cc": b"c"}
    for name, data in blobs.items():
        store.put(name, data)
        store.put(name, data)

    assert {name: store.get(name) for name in blobs} == blobs
    assert store.part("u/000001/0-0-aa", slice(300, 1300)) == large[300:1300]
    assert store.part("u/000001/0-0-aa", slice(255_900, 300_000)) == large[-100:]
    assert store.list() == {name: len(data) for name, data in sorted(blobs.items())}
    assert list(store.list()) == sorted(blobs)
    assert list(store.list("u/")) == ["u/000001/0-0-aa", "u/000001/1-0-bb"]

    with pytest.raises(WeightsError, match="with other bytes"):
        store.put("v/000001/0-0-cc", b"d")
    assert store.get("v/000001/0-0-cc") == b"c"

    store.delete("u/000001/0-0-aa")
    store.delete("u/000001/0-0-aa")
    with pytest.raises(WeightsError, match="u/000001/0-0-aa is not"):
        store.get("u/000001/0-0-aa")
    with pytest.raises(WeightsError, match="u/000001/0-0-aa is not"):
        store.part("u/000001/0-0-aa", slice(0, 1))
    assert list(store.list("u/")) == ["u/000001/1-0-bb"]

    more = [f"u/000001/{n}-0-dd" for n in range(2, 6)]
    for name in more:
        store.put(name, large)
    store.delete(*more[:2], "u/000001/9-0-ee", *more[2:])
    store.delete()
    assert list(store.list()) == ["u/000001/1-0-bb", "v/000001/0-0-cc"]


def check_names(store: BlobStore) -> None:
    for name in ("../x", "/x", "x/../../y", ".x", "X", ""):
        part = partial(store.part, place=slice(0, 1))
        for use in (store.get, part, store.delete, lambda name: store.put(name, b"x")):
            with pytest.raises(WeightsError, match="not the name of a blob"):
                use(name)
    assert list(store.list()) == []
