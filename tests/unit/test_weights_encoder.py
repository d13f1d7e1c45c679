"""The learner's side: what is encoded, when the base moves, and that the number of ranks changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import WeightsError
from streamrl.protocol.weights.encoder import ShardEncoder
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, Coding, HeldRange, digest_of
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.versions import make_version
from tests.weights_world import World, assert_holds, nudged, random_state


def held(bits: np.ndarray, *, tensor: str = "w", start: int = 0) -> list[HeldRange]:
    return [HeldRange(tensor=tensor, start=start, bits=bits)]


def coding_of(encoder: ShardEncoder, bits: np.ndarray) -> Coding:
    (said,) = encoder.encode(held(bits), anchor=False).ranges
    return said.coding


def published(bits: np.ndarray) -> ShardEncoder:
    encoder = ShardEncoder()
    encoder.encode(held(bits), anchor=True)
    encoder.advance()
    return encoder


def test_an_anchor_is_the_bytes_themselves():
    bits = np.arange(1000, dtype="<u2")

    shard = ShardEncoder().encode(held(bits), anchor=True)

    assert shard.blob == bits.tobytes()
    assert shard.ranges[0].coding is Coding.RAW
    assert shard.ranges[0].digest == digest_of(bits.data)
    assert shard.ranges[0].num_changed == shard.ranges[0].length == 1000


def test_the_coding_follows_from_how_much_changed_and_how():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, size=10_000, dtype="<u2")
    encoder = published(bits)

    few = bits.copy()
    few[::500] += 1
    assert coding_of(encoder, bits) is Coding.SAME
    assert coding_of(encoder, few) is Coding.SPARSE
    assert coding_of(encoder, bits + 1) is Coding.SPARSE
    assert coding_of(encoder, rng.integers(0, 1 << 16, size=10_000, dtype="<u2")) is Coding.RAW


def test_a_delta_of_one_percent_is_a_hundred_times_smaller():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, size=1 << 20, dtype="<u2")
    encoder = published(bits)

    shard = encoder.encode(held(bits + (rng.random(len(bits)) < 0.01).astype("<u2")), anchor=False)

    assert len(shard.blob) * 100 < bits.nbytes


def test_the_base_moves_only_when_told():
    bits = np.zeros(1000, dtype="<u2")
    encoder = published(bits)
    first, second = bits.copy(), bits.copy()
    first[3], second[4] = 1, 1

    encoder.encode(held(first), anchor=False)  # its publish failed: no advance
    again = encoder.encode(held(second), anchor=False)
    assert again.ranges[0].num_changed == 1
    encoder.advance()

    assert coding_of(encoder, second) is Coding.SAME
    assert encoder.encode(held(first), anchor=False).ranges[0].num_changed == 2


def test_the_base_is_the_callers_own_array():
    """It costs no copy; what the caller wrote into it would be taken for what is announced."""
    bits = np.zeros(1000, dtype="<u2")
    encoder = published(bits)
    bits[3] = 1

    assert coding_of(encoder, bits) is Coding.SAME
    assert encoder.encode_base().blob == bits.tobytes()


def test_long_ranges_are_cut_and_empty_ones_left_out():
    bits = np.zeros(MAX_RANGE_ELEMENTS + 5, dtype="<u2")
    ranges = held(bits, start=100) + held(np.empty(0, dtype="<u2"), tensor="none")

    shard = ShardEncoder().encode(ranges, anchor=True)

    assert [(said.start, said.length) for said in shard.ranges] == [
        (100, MAX_RANGE_ELEMENTS),
        (100 + MAX_RANGE_ELEMENTS, 5),
    ]


def test_a_rank_that_holds_nothing_publishes_an_empty_blob():
    shard = ShardEncoder().encode([], anchor=True)

    assert shard.blob == b""
    assert shard.record(run_uid="u", version=make_version(1, 0), rank=3).ranges == ()


def test_a_delta_needs_the_same_ranges_as_its_base():
    encoder = published(np.zeros(10, dtype="<u2"))

    for other in [
        held(np.zeros(11, dtype="<u2")),
        held(np.zeros(10, dtype="<u4")),
        held(np.zeros(10, dtype="<u2"), start=1),
    ]:
        with pytest.raises(WeightsError, match="other ranges"):
            encoder.encode(other, anchor=False)
    with pytest.raises(WeightsError, match="other ranges"):
        ShardEncoder().encode(held(np.zeros(10, dtype="<u2")), anchor=False)


def test_an_anchor_may_change_the_ranges():
    encoder = published(np.zeros(10, dtype="<u2"))
    other = held(np.zeros(6, dtype="<u2"), start=4)

    encoder.encode(other, anchor=True)
    encoder.advance()

    assert encoder.encode(other, anchor=False).ranges[0].coding is Coding.SAME


def test_equal_content_gives_an_equal_name_so_that_a_retry_is_idempotent():
    shard = ShardEncoder().encode(held(np.arange(9, dtype="<u2")), anchor=True)
    record = shard.record(run_uid="abc", version=make_version(6, 103), rank=2)

    assert record.blob_name == f"abc/000006/103-2-{digest_of(shard.blob).hex()}"
    assert record == shard.record(run_uid="abc", version=make_version(6, 103), rank=2)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_gives_workers_the_same_bits(tmp_path: Path, num_ranks):
    rng = np.random.default_rng(7)  # the same states for each number of ranks
    world = World(MemoryStore(), num_ranks=num_ranks)
    mirror = Mirror(tmp_path)
    state = random_state(rng)
    for _ in range(5):
        mirror.apply(world.publish(state), world.store)
        assert_holds(mirror.path, state)
        state = nudged(rng, state)
