"""The worker's side: the file is a safetensors file, follows versions bit by bit, and is never wrong and trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import ResourceError, TransportError, WeightsError
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.delta import columns
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.mirror_file import create_file
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import (
    RUN_UID,
    TENSORS,
    World,
    assert_holds,
    nudged,
    random_state,
    read_safetensors,
)


class FlakyStore(MemoryStore):
    """Gives what `answer` makes of a blob; `answer` may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[str, bytes], bytes] = lambda name, blob: blob
        self.num_gets = 0

    def get(self, name: str) -> bytes:
        self.num_gets += 1
        return self.answer(name, super().get(name))


def make_world(num_versions: int, *, num_ranks: int = 2, store: MemoryStore | None = None) -> World:
    """Version 0 is an anchor, the others are deltas."""
    rng = np.random.default_rng(3)
    world = World(MemoryStore() if store is None else store, num_ranks=num_ranks)
    state = random_state(rng)
    for _ in range(num_versions):
        world.publish(state)
        state = nudged(rng, state)
    return world


def versions(world: World) -> list[Manifest]:
    return list(world.manifests.values())


def test_the_mirror_is_a_safetensors_file_of_every_version(tmp_path: Path):
    world = make_world(4)
    mirror = Mirror(tmp_path, run_uid=RUN_UID)

    for manifest in versions(world):
        mirror.apply(manifest, world.store)
        assert mirror.version == manifest.version
        assert_holds(mirror.path, world.states[manifest.version])

    kinds = {name: (dtype, shape) for name, (dtype, shape, _) in read_safetensors(mirror.path).items()}
    assert kinds == {
        "model.embed": ("BF16", [97, 16]),
        "model.norm": ("F32", [33]),
        "model.scale": ("F16", []),
        "model.unused": ("BF16", [0, 4]),
        "model.proj": ("BF16", [64, 40]),
    }


def test_the_data_is_aligned_for_whoever_maps_it(tmp_path: Path):
    create_file(tmp_path / "file", TENSORS)

    header_bytes = int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")

    assert (8 + header_bytes) % 64 == 0


def test_several_versions_at_once_give_the_last_one(tmp_path: Path):
    world = make_world(9)
    *_, last = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply_path(catch_up(0, versions(world)[2], world.manifests.get), world.store)

    mirror.apply_path(catch_up(mirror.version, last, world.manifests.get), world.store)

    assert mirror.version == last.version
    assert_holds(mirror.path, world.states[last.version])


def test_a_newer_anchor_takes_over_whatever_there_was(tmp_path: Path):
    world = make_world(2)
    mirror = Mirror(tmp_path)
    mirror.apply(versions(world)[0], world.store)

    state = random_state(np.random.default_rng(9))
    mirror.apply(world.publish(state, anchor=True), world.store)

    assert_holds(mirror.path, state)


def test_an_unchanged_version_is_proved_without_a_byte(tmp_path: Path):
    world = make_world(1)
    (first,) = versions(world)
    mirror = Mirror(tmp_path)
    mirror.apply(first, world.store)

    same = world.publish(world.states[first.version])
    mirror.apply(same, world.store)

    assert sum(shard.num_bytes for shard in same.shards) == 0
    assert mirror.version == same.version


def refused(mirror: Mirror, manifest: Manifest, store: MemoryStore, *, match: str = "") -> None:
    with pytest.raises(WeightsError, match=match):
        mirror.apply(manifest, store)
    assert mirror.version == 0


def test_a_wrong_base_an_old_version_and_a_wrong_run_are_refused(tmp_path: Path):
    world = make_world(4)
    first, second, third, fourth = versions(world)
    mirror = Mirror(tmp_path, run_uid=RUN_UID)

    def start_over() -> None:
        mirror.apply_path([first, second], world.store)

    refused(mirror, second, world.store, match="holds nothing")
    start_over()
    refused(mirror, fourth, world.store, match=r"is a delta on 1.2, but the mirror holds 1.1")
    refused(mirror, third, world.store, match="holds nothing")
    start_over()
    refused(mirror, second, world.store, match="not newer")
    start_over()
    refused(mirror, first, world.store, match="not newer")
    start_over()
    refused(mirror, replace(third, run_uid="run-b"), world.store, match="belongs to run")


def test_a_delta_on_other_tensors_is_refused(tmp_path: Path):
    world = make_world(2)
    first, second = versions(world)
    embed, *others = TENSORS
    reshaped = replace(embed, shape=(16, 97))
    retyped = replace(embed, dtype="float16")

    for tensors, match in [
        (others, "model.embed is missing"),
        ([*TENSORS, TensorMeta(name="more", dtype="float32", shape=(1,))], "more is unknown"),
        ([reshaped, *others], r"model.embed is bfloat16 \[16, 97\], should be bfloat16 \[97, 16\]"),
        ([retyped, *others], "model.embed is float16"),
    ]:
        mirror = Mirror(tmp_path)
        mirror.apply(first, world.store)
        refused(mirror, replace(second, tensors=tuple(tensors)), world.store, match=match)


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


def test_deltas_of_learners_of_different_sizes_make_one_path(tmp_path: Path):
    """A restart with other ranks cuts tensors elsewhere; a delta then never follows, but a reader need not know."""
    rng = np.random.default_rng(5)
    one, three = World(MemoryStore()), World(MemoryStore(), num_ranks=3)
    state = random_state(rng)
    anchor = one.publish(state)
    three.publish(state)
    for step in range(4):
        state = nudged(rng, state)
        manifests = [world.publish(state) for world in (one, three)]
        assert manifests[0].version == manifests[1].version, step
    mixed = [
        anchor,
        *(
            worlds[0] if n % 2 else worlds[1]
            for n, worlds in enumerate(
                zip(list(one.manifests.values())[1:], list(three.manifests.values())[1:], strict=True)
            )
        ),
    ]
    both = MemoryStore()
    both.blobs = {**one.store.blobs, **three.store.blobs}

    mirror = Mirror(tmp_path)
    mirror.apply_path(mixed, both)

    assert_holds(mirror.path, state)


def test_many_deltas_are_patched_stretch_by_stretch():
    world = make_world(4, num_ranks=2)
    deltas = versions(world)[1:]

    found = list(columns(deltas, world.store.blobs))
    stretches = [{(piece.record.tensor, piece.record.start) for piece in column} for column in found]

    assert all(len(stretch) == 1 for stretch in stretches)
    assert len(stretches) == len({place for stretch in stretches for place in stretch})
    versions_of = {id(part): m.version for m in deltas for shard in m.shards for part in shard.ranges}
    for column in found:
        numbers = [versions_of[id(piece.record)] for piece in column]
        assert numbers == sorted(numbers), "each on the one before"


def test_no_more_deltas_than_fit_in_memory_are_held_at_a_time(tmp_path: Path):
    """Whatever the budget, the state at the end is the same."""
    world = make_world(9)
    last = versions(world)[-1]
    mirror = Mirror(tmp_path, ahead_bytes=2 * last.num_bytes)

    mirror.apply_path(versions(world), world.store)

    assert mirror.version == last.version
    assert_holds(mirror.path, world.states[last.version])


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


def test_closing_removes_the_file_and_a_new_mirror_may_take_the_folder_of_a_dead_one(tmp_path: Path):
    world = make_world(1)
    dead = Mirror(tmp_path)
    dead.apply(versions(world)[0], world.store)

    mirror = Mirror(tmp_path)
    assert mirror.version == 0
    mirror.apply(versions(world)[0], world.store)
    assert_holds(mirror.path, world.states[mirror.version])
    assert len(list(tmp_path.iterdir())) == 1

    mirror.close()
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
