"""A mirror whose store is out of reach or gives damaged blobs: it is never wrong and trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import ResourceError, TransportError, WeightsError
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.mirror_file import create_file
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import RUN_UID, assert_holds, make_world, refused, versions


class FlakyStore(MemoryStore):
    """Gives what `answer` makes of a blob; `answer` may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[str, bytes], bytes] = lambda name, blob: blob
        self.num_gets = 0

    def get(self, name: str) -> bytes:
        self.num_gets += 1
        return self.answer(name, super().get(name))


def test_a_missing_blob_is_refused(tmp_path: Path):
    world = make_world(2)
    first, second = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply(first, world.store)
    world.store.delete(second.shards[1].blob_name)

    refused(mirror, second, world.store, match="not there")


def test_a_flip_on_the_way_is_mended_by_fetching_again(tmp_path: Path):
    store = FlakyStore()
    world = make_world(1, store=store)
    store.answer = lambda name, blob: blob[:-1] + b"x" if store.num_gets == 1 else blob
    mirror = Mirror(tmp_path)

    mirror.apply(versions(world)[0], store)

    assert_holds(mirror.path, world.states[mirror.version])


def test_after_a_failure_an_anchor_mends_the_mirror(tmp_path: Path):
    store = FlakyStore()
    world = make_world(3, store=store)
    first, second, third = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply(first, store)
    store.answer = lambda name, blob: blob[::-1]
    refused(mirror, second, store, match="does not agree with its digest")

    store.answer = lambda name, blob: blob
    mirror.apply_path(catch_up(mirror.version, third, world.manifests.get), store)

    assert_holds(mirror.path, world.states[third.version])


def unreachable(store: FlakyStore, *names: str) -> None:
    def answer(name: str, blob: bytes) -> bytes:
        if name in names:
            raise TransportError("not now")
        return blob

    store.answer = answer


def test_a_store_that_cannot_be_reached_leaves_a_delta_undone(tmp_path: Path):
    store = FlakyStore()
    world = make_world(4, store=store)
    first, second, third, fourth = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply_path([first, second], store)

    unreachable(store, third.shards[1].blob_name)
    with pytest.raises(TransportError):
        mirror.apply(third, store)
    assert mirror.version == second.version
    assert_holds(mirror.path, world.states[second.version])

    unreachable(store, fourth.shards[1].blob_name)  # the third version whole, the fourth in half
    with pytest.raises(TransportError):
        mirror.apply_path([third, fourth], store)
    assert mirror.version == third.version
    assert_holds(mirror.path, world.states[third.version])

    unreachable(store)
    mirror.apply(fourth, store)
    assert_holds(mirror.path, world.states[fourth.version])


def test_a_store_that_cannot_be_reached_in_the_midst_of_an_anchor_leaves_nothing_to_trust(tmp_path: Path):
    store = FlakyStore()
    world = make_world(2, store=store)
    first, second = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply(first, store)
    newer = world.publish(world.states[second.version], anchor=True)
    unreachable(store, newer.shards[1].blob_name)

    with pytest.raises(TransportError):
        mirror.apply(newer, store)

    assert mirror.version == 0


def test_a_change_of_the_file_behind_our_back_is_found_where_a_delta_touches_it(tmp_path: Path):
    world = make_world(2)
    first, second = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply(first, world.store)
    with mirror.path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))

    refused(mirror, second, world.store, match="does not agree with its digest")


def test_no_room_is_one_clear_error_before_anything_is_written(tmp_path: Path):
    huge = TensorMeta(name="huge", dtype="bfloat16", shape=(1 << 40,))

    with pytest.raises(ResourceError, match=r"needs 2199.02 GB in .*, which has .* GB free"):
        create_file(tmp_path / "file", [huge])

    assert not list(tmp_path.iterdir())


def damaged(rng: np.random.Generator, data: bytes) -> bytes:
    """Flipped bits, a cut, or something more."""
    kind = rng.integers(3)
    if kind == 0 and data:
        flipped = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            flipped[rng.integers(len(data))] ^= 1 << rng.integers(8)
        return bytes(flipped)
    if kind == 1:
        return data[: rng.integers(len(data) + 1)]
    return data + bytes(rng.integers(1, 20))


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_blobs_and_manifests_no_wrong_state_is_trusted(tmp_path: Path, seed):
    rng = np.random.default_rng(seed)
    store = FlakyStore()
    world = make_world(4, store=store)
    wire = [encode_manifest(manifest) for manifest in versions(world)]
    names = list(store.list())
    mirror = Mirror(tmp_path, run_uid=RUN_UID)
    num_refused = 0

    for _ in range(100):
        mirror.apply_path(versions(world)[: rng.integers(1, 4)], store)
        data = wire[rng.integers(len(wire))]
        match rng.integers(3):
            case 0:
                data = damaged(rng, data)
            case 1:
                store.answer = lambda name, blob: damaged(rng, blob)
            case 2:
                store.answer = lambda name, blob: store.blobs[names[rng.integers(len(names))]]  # swapped
        try:
            mirror.apply(decode_manifest(data), store)
        except WeightsError:
            num_refused += 1
        store.answer = lambda name, blob: blob
        if mirror.version:
            assert_holds(mirror.path, world.states[mirror.version])
            mirror.close()
    assert num_refused > 50


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ResourceError, match=r"cannot create the mirror of the weights in .*: Not a directory"):
        Mirror(tmp_path / "file" / "folder")
