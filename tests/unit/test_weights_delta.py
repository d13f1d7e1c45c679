"""The delta codecs: bit-identical whatever the bits, the same bytes from both, and hostile bytes give one error."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.protocol.weights.format import Coding, RangeRecord, digest_of
from streamrl.protocol.weights.kernels import Compiled
from streamrl.protocol.weights.sparse import Codec, CodedRange, InPasses, expand, plain_of

DTYPES = [np.dtype("<u2"), np.dtype("<u4")]


@pytest.fixture(scope="module", params=[InPasses, Compiled])
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param()


def round_trip(codec: Codec, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`old` patched with what `new` changed, by way of the coding."""
    found, by_numpy = codec.changes(new, old), InPasses().changes(new, old)
    assert found.digest == digest_of(new.data)
    assert found.num_changed == np.count_nonzero(new != old)
    assert bytes(found.plain) == bytes(by_numpy.plain), "one coding, whoever writes it"
    patched = old.copy()
    if found.num_changed:
        coded = compressed(found.plain)
        add(codec, [coded_range(coded, num_changed=found.num_changed, start=0, length=len(old))], patched)
    return patched


def compressed(plain: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plain.data)


def coding_of(positions: np.ndarray, differences: np.ndarray) -> bytes:
    return compressed(plain_of(positions, differences))


def add(codec: Codec, codings: list[CodedRange], tensor: np.ndarray) -> np.ndarray:
    """Where."""
    decompressor = zstandard.ZstdDecompressor()
    plains = [expand(one, dtype=tensor.dtype, decompressor=decompressor) for one in codings]
    return codec.add(codings, plains, tensor)


def coded_range(coded: bytes, *, num_changed: int, start: int, length: int) -> CodedRange:
    record = RangeRecord(
        tensor="t",
        start=start,
        length=length,
        coding=Coding.SPARSE,
        num_changed=num_changed,
        num_bytes=len(coded),
        digest=bytes(16),
    )
    return CodedRange(record=record, data=memoryview(coded))


@given(
    dtype=st.sampled_from(DTYPES),
    length=st.integers(1, 600_000),
    share=st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_change_of_any_size_comes_back_bit_identical(codec, dtype, length, share, seed):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, size=length, dtype=dtype, endpoint=True)
    new = np.where(rng.random(length) < share, rng.integers(0, np.iinfo(dtype).max, size=length, dtype=dtype), old)

    assert np.array_equal(round_trip(codec, new, old), new)


@given(dtype=st.sampled_from(DTYPES), data=st.data())
def test_chosen_positions_and_bits_come_back_bit_identical(codec, dtype, data):
    length = data.draw(st.integers(1, 300_000))
    positions = data.draw(st.lists(st.integers(0, length - 1), unique=True, max_size=20))
    old = np.zeros(length, dtype=dtype)
    new = old.copy()
    for position in positions:
        new[position] = data.draw(st.integers(0, int(np.iinfo(dtype).max)))

    assert np.array_equal(round_trip(codec, new, old), new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [0, 254, 65_533, 65_534, 65_535, 65_536, 131_071, 1_000_000])
def test_gaps_around_the_escape_come_back(codec, dtype, gap):
    old = np.zeros(3 * gap + 8, dtype=dtype)
    new = old.copy()
    new[[gap, 2 * gap + 1, 3 * gap + 2]] = 7

    assert np.array_equal(round_trip(codec, new, old), new)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.uint32(0x7FC00001).view(np.float32), np.uint32(0x7FC00002).view(np.float32)),
        (np.float32("inf"), np.float32("nan")),
        (np.uint16(0x8000), np.uint16(0x0000)),
        (np.uint16(0x0000), np.uint16(0xFFFF)),
    ],
)
def test_values_that_arithmetic_would_confuse_are_kept_apart(codec, before, after):
    dtype = np.dtype(f"<u{before.nbytes}")
    old = np.full(100, before).view(dtype)
    new = old.copy()
    new[50] = np.array(after).view(dtype)

    assert codec.changes(new, old).num_changed == 1
    assert np.array_equal(round_trip(codec, new, old), new)


@given(
    dtype=st.sampled_from(DTYPES),
    ranges=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300_000)), min_size=1, max_size=5),
    share=st.sampled_from([1e-5, 1e-3, 0.6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_deltas_added_together_are_those_added_one_by_one(codec, dtype, ranges, share, seed):
    rng = np.random.default_rng(seed)
    codings, tensor = [], np.zeros(301_000, dtype=dtype)
    for start, length in ranges:
        positions = np.flatnonzero(rng.random(length) < share)
        if len(positions):
            differences = rng.integers(1, np.iinfo(dtype).max, size=len(positions), dtype=dtype)
            coded = coding_of(positions, differences)
            codings.append(coded_range(coded, num_changed=len(positions), start=start, length=length))
            tensor[start + positions] += differences
    patched = np.zeros_like(tensor)

    where = add(codec, codings, patched) if codings else np.empty(0, dtype=np.int64)

    assert np.array_equal(patched, tensor)
    assert set(where.tolist()) >= set(np.flatnonzero(tensor).tolist())


def test_wide_gaps_that_one_delta_lacks_and_another_has_too_many_of_are_refused(codec):
    """In sum they would agree."""
    near, _ = coded_example()
    far = coding_of(np.array([3, 4, 5, 6]), np.ones(4, dtype="<u2"))
    lacks, has = (zstandard.decompress(coded) for coded in (near, far))
    moved = [lacks[:-4], has + lacks[-4:]]
    codings = [coded_range(zstandard.compress(plain, 1), num_changed=4, start=0, length=200_001) for plain in moved]

    with pytest.raises(WeightsError, match="wide gaps"):
        add(codec, codings, np.zeros(200_001, dtype="<u2"))


def coded_example() -> tuple[bytes, np.ndarray]:
    positions = np.array([3, 70_000, 70_001, 200_000])
    return coding_of(positions, np.array([1, 65_535, 2, 1], dtype="<u2")), positions


def test_a_delta_that_claims_other_counts_or_a_shorter_range_is_refused(codec):
    coded, positions = coded_example()
    tensor = np.zeros(200_001, dtype="<u2")
    assert (
        add(codec, [coded_range(coded, num_changed=4, start=0, length=200_001)], tensor).tolist() == positions.tolist()
    )

    for num_changed, length in [(3, 200_001), (5, 200_001), (4, 200_000), (4, 10)]:
        with pytest.raises(WeightsError):
            add(codec, [coded_range(coded, num_changed=num_changed, start=0, length=length)], tensor)


def test_a_bomb_is_refused_before_it_expands(codec):
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))

    with pytest.raises(WeightsError, match="claims to expand"):
        add(codec, [coded_range(bomb, num_changed=4, start=0, length=1000)], np.zeros(1000, dtype="<u2"))


@given(cut=st.integers(0, 60), flips=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 7)), max_size=3))
def test_damaged_bytes_give_positions_within_the_range_or_one_error(codec, cut, flips):
    """And nothing beside the range is written to, whatever comes of it."""
    coded = bytearray(coded_example()[0])
    coded = coded[: len(coded) - cut] if cut < len(coded) else bytearray()
    for place, bit in flips:
        if coded:
            coded[place % len(coded)] ^= 1 << bit
    tensor = np.zeros(200_021, dtype="<u2")
    try:
        positions = add(codec, [coded_range(bytes(coded), num_changed=4, start=10, length=200_001)], tensor)
    except WeightsError:
        pass
    else:
        assert len(positions) == 4
        assert (np.diff(positions) > 0).all()
        assert positions[0] >= 10
        assert positions[-1] <= 200_010
    assert not tensor[:10].any()
    assert not tensor[200_011:].any()


def test_arrays_that_lie_between_words_are_compared_too(codec):
    """Views into a file or a larger tensor need not begin where a word does."""
    memory = np.random.default_rng(0).integers(0, 1 << 16, size=2_003, dtype="<u2")
    for begin, end in [(1, 2_003), (3, 70), (7, 71), (5, 2_000)]:
        old = memory[begin:end]
        new = old.copy()
        new[::9] += 1
        assert np.array_equal(round_trip(codec, new, old), new)
