"""Many deltas at once: in the order of versions, over several threads, and with one error when one of them is wrong."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from streamrl.errors import WeightsError
from streamrl.protocol.weights.delta import patch, side_by_side, threads_for
from streamrl.protocol.weights.format import Coding, TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import World, nudged, random_bits

TENSORS = (
    TensorMeta(name="wide", dtype="bfloat16", shape=(100_000,)),
    TensorMeta(name="exact", dtype="float32", shape=(300,)),
)


def deltas(world: World) -> tuple[list[Manifest], dict[str, bytes]]:
    manifests = [manifest for manifest in world.manifests.values() if manifest.base]
    names = [shard.blob_name for manifest in manifests for shard in manifest.shards]
    return manifests, {name: world.store.get(name) for name in names}


def make_world(rng: np.random.Generator, *, num_ranks: int = 1) -> World:
    """An anchor and six deltas; the fourth of them has nearly everything of one tensor anew."""
    world = World(MemoryStore(), tensors=TENSORS, num_ranks=num_ranks)
    state = {tensor.name: random_bits(rng, np.dtype(bits), tensor.num_elements) for tensor, bits in BITS}
    for number in range(7):
        world.publish(state)
        state = nudged(rng, state, share=0.4)
        if number == 3:
            state = {**state, "wide": random_bits(rng, np.dtype("<u2"), 100_000)}
    return world


BITS = [(TENSORS[0], "<u2"), (TENSORS[1], "<u4")]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_many_deltas_at_once_give_the_last_state(num_ranks: int, num_threads: int) -> None:
    world = make_world(np.random.default_rng(1), num_ranks=num_ranks)
    first, *_, last = world.states.values()
    tensors = {name: bits.copy() for name, bits in first.items()}
    manifests, blobs = deltas(world)
    codings = {part.coding for manifest in manifests for shard in manifest.shards for part in shard.ranges}
    assert codings >= {Coding.RAW, Coding.SPARSE}

    changed = patch(tensors, manifests, blobs, num_threads=num_threads)

    assert changed == {"wide", "exact"}
    for name, bits in tensors.items():
        assert np.array_equal(bits, last[name]), name


@pytest.mark.parametrize("num_threads", [1, 3])
def test_one_delta_that_does_not_decode_is_an_error_of_all(num_threads: int) -> None:
    world = make_world(np.random.default_rng(2))
    tensors = {name: bits.copy() for name, bits in next(iter(world.states.values())).items()}
    manifests, blobs = deltas(world)
    [shard] = manifests[2].shards
    fewer = tuple(part._replace(num_changed=part.num_changed - 1) for part in shard.ranges)
    manifests[2] = replace(manifests[2], shards=(replace(shard, ranges=fewer),))

    with pytest.raises(WeightsError):
        patch(tensors, manifests, blobs, num_threads=num_threads)


def test_an_error_leaves_no_thread_at_work() -> None:
    both = threading.Barrier(2)

    def work(item: int) -> None:
        if item < 2:
            both.wait(timeout=240)
        if item == 0:
            raise WeightsError("of the first")

    with pytest.raises(WeightsError, match="of the first"):
        side_by_side(work, range(1000), num_threads=2)

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("patching")]


def test_a_single_delta_takes_one_thread() -> None:
    assert threads_for(1) == 1
    assert 1 <= threads_for(2) <= 4
