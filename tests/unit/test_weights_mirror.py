"""The worker's side: the file is a safetensors file, follows versions bit by bit, and refuses what does not follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.delta import columns
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.mirror_file import create_file
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import (
    RUN_UID,
    TENSORS,
    World,
    assert_holds,
    make_world,
    nudged,
    random_state,
    read_safetensors,
    refused,
    versions,
)


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
