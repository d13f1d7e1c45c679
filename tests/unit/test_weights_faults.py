"""Weights under fire: damaged blobs, permuted tensors, a disk that is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import TransportError, WeightsError
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.file_store import FileStore
from streamrl.protocol.weights.format import digest_of
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import RUN_UID, World, assert_holds, nudged, random_state


def test_bits_flipped_and_cut_in_any_blob_are_never_served(tmp_path: Path):
    rng = np.random.default_rng(0)
    world = World(MemoryStore(), num_ranks=2)
    state = random_state(rng)
    for _ in range(4):
        world.publish(state)
        state = nudged(rng, state)
    *_, last = world.manifests.values()
    for name in list(world.store.list()):
        whole = world.store.get(name)
        for damaged in _damage(whole, rng):
            world.store.blobs[name] = damaged
            mirror = Mirror(tmp_path)
            with pytest.raises(WeightsError, match="does not agree with its digest"):
                mirror.apply_path(catch_up(0, last, world.manifests.get), world.store)
            assert mirror.version == 0
        world.store.blobs[name] = whole


def _damage(data: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    for _ in range(5):
        flipped = bytearray(data)
        flipped[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        yield bytes(flipped)
        yield data[: rng.integers(len(data))]


def test_a_tensor_whose_rows_were_permuted_on_the_way_is_not_served(tmp_path: Path):
    """Even when whoever did it made the blob's digest, its name and the manifest's own digest agree."""
    world = World(MemoryStore())
    manifest = world.publish(random_state(np.random.default_rng(0)))
    [shard] = manifest.shards
    blob = bytearray(world.store.get(shard.blob_name))
    [place] = [place for record, place in shard.placed_ranges() if record.tensor == "model.embed"]
    rows = np.frombuffer(bytes(blob[place]), dtype=np.uint16).reshape(97, 16)
    blob[place] = rows[::-1].tobytes()
    forged = replace(shard, blob_name=shard.blob_name + "0", digest=digest_of(bytes(blob)))
    world.store.put(forged.blob_name, bytes(blob))
    mirror = Mirror(tmp_path, run_uid=RUN_UID)

    with pytest.raises(WeightsError, match=r"model\.embed from element 0 does not agree with its digest"):
        mirror.apply(decode_manifest(encode_manifest(replace(manifest, shards=(forged,)))), world.store)

    assert mirror.version == 0


@pytest.mark.root
def test_a_store_whose_disk_is_full_fails_the_publish_and_serves_on(tmp_path: Path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(blobs)], check=True)
    try:
        rng = np.random.default_rng(0)
        world = World(FileStore(blobs))
        states_ = [random_state(rng)]
        first = world.publish(states_[0])
        mirror = Mirror(tmp_path / "mirror")
        mirror.apply(first, world.store)
        filler = blobs / "filler"
        filler.write_bytes(b"x" * (48 << 10))
        state = random_state(rng)  # nothing stays as it was: as large as an anchor

        with pytest.raises(TransportError, match="No space left on device"):
            world.publish(state)
        assert set(world.store.list()) == {*first.blob_names, "filler"}, "nothing half written is left"

        filler.unlink()
        second = world.publish(state)
        assert second.base == first.version, "from the same base"
        mirror.apply(second, world.store)
        assert_holds(mirror.path, state)
    finally:
        subprocess.run(["umount", str(blobs)], check=True)
