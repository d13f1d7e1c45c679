"""Manifests: bytes and back, what is refused, and that the specification is enough to read a version without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.protocol.weights.format import MAGIC, Coding, TensorMeta, check_blob_name, digest_of
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest, decode_record, encode_manifest, encode_record
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import TENSORS, World, nudged, random_state

CANARY = (1, 5, 9)


def two_versions() -> tuple[World, Manifest, Manifest]:
    rng = np.random.default_rng(0)
    world = World(MemoryStore(), num_ranks=2)
    state = random_state(rng)
    return world, world.publish(state), world.publish(nudged(rng, state))


def test_manifest_and_record_come_back_as_they_were():
    _, anchor, delta = two_versions()

    for manifest in (anchor, delta, replace(delta, canary_ids=CANARY)):
        assert decode_manifest(encode_manifest(manifest)) == manifest
    for record in (*anchor.shards, *delta.shards):
        assert decode_record(encode_record(record)) == record


def without_last_range(manifest: Manifest) -> Manifest:
    shard = manifest.shards[-1]
    gone = shard.ranges[-1]
    kept = replace(shard, ranges=shard.ranges[:-1], num_bytes=shard.num_bytes - gone.num_bytes)
    return replace(manifest, shards=(*manifest.shards[:-1], kept))


def with_first_range(manifest: Manifest, **changes: Any) -> Manifest:
    shard = manifest.shards[0]
    ranges = (shard.ranges[0]._replace(**changes), *shard.ranges[1:])
    return replace(manifest, shards=(replace(shard, ranges=ranges), *manifest.shards[1:]))


INCOHERENT: list[tuple[str, Callable[[Manifest], Manifest]]] = [
    ("missing|are published", without_last_range),
    ("missing", lambda m: replace(m, shards=m.shards[1:])),
    ("given twice", lambda m: replace(m, shards=(*m.shards, m.shards[0]))),
    ("cannot build on", lambda m: replace(m, base=m.version)),
    ("cannot build on", lambda m: replace(m, version=5, base=0)),
    ("add up", lambda m: replace(m, shards=(replace(m.shards[0], num_bytes=1), *m.shards[1:]))),
    ("has a coding that", lambda m: replace(m, base=0)),
    ("has a coding that", lambda m: with_first_range(m, coding=Coding.RAW)),
    ("has a coding that", lambda m: with_first_range(m, num_changed=0)),
    ("has a coding that", lambda m: with_first_range(m, length=1 << 23)),
    ("missing|given twice", lambda m: with_first_range(m, start=1)),
    ("unknown tensor", lambda m: with_first_range(m, tensor="other")),
    ("unknown tensor", lambda m: replace(m, tensors=m.tensors[1:])),
    ("each once", lambda m: replace(m, tensors=(*m.tensors, m.tensors[0]))),
    (
        "name of a tensor",
        lambda m: replace(m, tensors=(*m.tensors, TensorMeta(name="a\nb", dtype="float32", shape=(0,)))),
    ),
    ("too many", lambda m: replace(m, tensors=(*m.tensors, TensorMeta(name="x", dtype="float32", shape=(1 << 50,))))),
    ("name of a blob", lambda m: replace(m, shards=(replace(m.shards[0], blob_name="../x"), *m.shards[1:]))),
    ("canary", lambda m: replace(m, canary_ids=(1,))),
    ("canary", lambda m: replace(m, canary_ids=(1, -5))),
]


@pytest.mark.parametrize(("message", "spoil"), INCOHERENT)
def test_a_manifest_that_is_not_coherent_is_never_announced(message, spoil):
    _, _, delta = two_versions()

    with pytest.raises(WeightsError, match=message):
        encode_manifest(spoil(delta))


def test_every_flipped_bit_and_every_cut_is_noticed():
    _, _, delta = two_versions()
    data = encode_manifest(delta)

    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(WeightsError):
            decode_manifest(bytes(flipped))
        with pytest.raises(WeightsError):
            decode_manifest(data[:place])


def under_a_right_digest(body: bytes) -> bytes:
    frame = zstandard.ZstdCompressor().compress(body)
    return MAGIC + digest_of(frame) + frame


@given(body=st.binary(max_size=300))
def test_any_bytes_under_a_right_digest_give_one_error(body):
    with pytest.raises(WeightsError):
        decode_manifest(under_a_right_digest(body))
    with pytest.raises(WeightsError):
        decode_record(body)


wrong_values = (
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40) | st.text(max_size=10) | st.just([])
)


@given(data=st.data())
def test_any_field_replaced_under_a_right_digest_gives_one_error_or_a_coherent_manifest(data):
    _, _, delta = two_versions()
    fields = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(encode_manifest(delta)[24:]))
    record = msgpack.unpackb(fields["shards"][0])
    spoiled = data.draw(st.sampled_from([fields, record]))
    spoiled[data.draw(st.sampled_from(sorted(spoiled)))] = data.draw(wrong_values)
    if spoiled is record:
        fields["shards"][0] = msgpack.packb(record)
    try:
        manifest = decode_manifest(under_a_right_digest(msgpack.packb(fields)))
    except WeightsError:
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_manifest_that_would_expand_without_end_is_refused():
    with pytest.raises(WeightsError, match="claims to expand"):
        decode_manifest(under_a_right_digest(bytes(1 << 27)))


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "a/../b", "a/./b", ".a", "a/.b", "A", "a b", "a\n", "é", "a" * 300]
)
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(WeightsError):
        check_blob_name(name)


def test_the_specification_is_enough_to_read_a_version_without_our_code():
    """Written from the text in `format` alone."""
    world, anchor, delta = two_versions()
    state: dict[str, np.ndarray] = {}

    for announced in (encode_manifest(anchor), encode_manifest(delta)):
        assert announced[:8] == b"SRLWGT02"
        assert xxhash.xxh3_128(announced[24:]).digest() == announced[8:24]
        manifest = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(announced[24:]))
        names = manifest["names"].split("\n")
        dims = np.frombuffer(manifest["dims"], "<u8").tolist()
        dtypes = {}
        for name, dtype, rank in zip(names, manifest["dtypes"], manifest["ranks"], strict=True):
            shape, dims = dims[:rank], dims[rank:]
            dtypes[name] = ("<u4", "<u2", "<u2")[dtype]
            state.setdefault(name, np.zeros(int(np.prod(shape)), dtypes[name]))
        for record in map(msgpack.unpackb, manifest["shards"]):
            apply_record(record, world.store.get(record["blob_name"]), state)

    assert {name: bits.tolist() for name, bits in state.items()} == {
        name: bits.tolist() for name, bits in world.states[delta.version].items()
    }
    assert len(names) == len(TENSORS)


def apply_record(record: dict[str, Any], blob: bytes, state: dict[str, np.ndarray]) -> None:
    assert xxhash.xxh3_128(blob).digest() == record["digest"]
    names = record["names"].split("\n")
    columns = [
        ("tensors", "<u4"),
        ("starts", "<u8"),
        ("lengths", "<u4"),
        ("codings", "u1"),
        ("num_changed", "<u4"),
        ("sizes", "<u4"),
    ]
    rows = zip(*(np.frombuffer(record[name], dtype).tolist() for name, dtype in columns), strict=True)
    for i, (tensor, start, length, coding, n, size) in enumerate(rows):
        data, blob = blob[:size], blob[size:]
        target = state[names[tensor]][start : start + length]
        if coding == 1:
            target[:] = np.frombuffer(data, target.dtype)
        elif coding == 2:
            patch(target, zstandard.ZstdDecompressor().decompress(data), n)
        assert xxhash.xxh3_128(target.tobytes()).digest() == record["digests"][16 * i : 16 * i + 16]
    assert blob == b""


def patch(target: np.ndarray, plain: bytes, n: int) -> None:
    width = target.itemsize
    wide = iter(np.frombuffer(plain[n * (2 + width) :], "<u4").tolist())
    position = -1
    for i in range(n):
        gap = plain[i] + 256 * plain[n + i]
        position += 1 + (next(wide) if gap == 65_535 else gap)
        z = sum(plain[(2 + byte) * n + i] << (8 * byte) for byte in range(width))
        difference = z >> 1 if z % 2 == 0 else ~(z >> 1)
        target[position] = (int(target[position]) + difference) % (1 << (8 * width))
