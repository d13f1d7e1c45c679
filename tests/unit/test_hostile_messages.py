"""Whatever lies in Redis, with any of its fields replaced by any other value: each reader gives what it reads, or the
one error of its kind, at once and without much memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
import redis
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import StreamrlError, WeightsError, WireError
from streamrl.learner.packing.cells import cells_of
from streamrl.protocol.transport.entries import decode_report, encode_report, to_entry, to_present, to_run_info
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.format import MAGIC, digest_of
from streamrl.protocol.weights.manifest_bytes import decode_manifest, decode_record, encode_manifest
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.protocol.wire.branches import Branch, rows_of
from streamrl.protocol.wire.codec import pack
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Span
from streamrl.protocol.wire.ticket import decode_ticket, encode_ticket
from streamrl.telemetry.progress import Progress
from tests.helpers import make_group, make_sample, make_ticket
from tests.weights_world import World, random_state

_MOST_BYTES = 64 << 20
MANIFEST = World(MemoryStore(), num_ranks=2).publish(random_state(np.random.default_rng(0)))
TWO = (Span(version=1, step=0, start=0, end=2), Span(version=2, step=1, start=2, end=4))
BRANCHED = make_sample(spans=TWO, turn_rewards=(0.5, 0.25), branches=(Branch(start=2, row=0, keep=3),))
HEADER, BODY = encode_group(make_group(make_ticket(5), samples=(make_sample(turn_rewards=(0.5,)), BRANCHED)))
GROUP = decode_header(HEADER)
NUM_RAW = 4 * GROUP.num_prompt_tokens + 8 * sum(GROUP.sample_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    sound: bytes  # a message
    read: Callable[[bytes], object]
    error: type[StreamrlError] = WireError


def read_asked(message: bytes) -> object:
    return decode_ticket(msgpack.packb({**msgpack.unpackb(encode_ticket(make_ticket(5))), "asked": message}))


def read_rows(message: bytes) -> object:
    """Of a body, under a digest that is right."""
    body = BODY[:NUM_RAW] + message
    return decode_body(header_with(body), body)


def header_with(body: bytes) -> Any:
    header = msgpack.unpackb(HEADER)
    return decode_header(msgpack.packb({**header, "digest": xxhash.xxh3_64_intdigest(body)}))


def read_manifest(message: bytes) -> object:
    frame = zstandard.ZstdCompressor().compress(message)
    return decode_manifest(MAGIC + digest_of(frame) + frame)


def read_index(message: bytes) -> object:
    with redis.Redis() as nowhere:
        index = RedisStore(nowhere, Keys("run"))._read("u/000001/0-0-aa", message)
    assert index.num_chunks < 1 << 24, "whoever deletes it asks for each"
    return index


def manifest_message() -> bytes:
    return zstandard.ZstdDecompressor().decompress(encode_manifest(MANIFEST)[24:])


KINDS: Mapping[str, Kind] = {
    "a ticket": Kind(sound=encode_ticket(make_ticket(5)), read=decode_ticket),
    "what a ticket asks": Kind(sound=make_ticket(5).asked, read=read_asked),
    "a group's header": Kind(sound=HEADER, read=decode_header),
    "a group's rows": Kind(sound=BODY[NUM_RAW:], read=read_rows),
    "a report": Kind(sound=encode_report(Progress(part="worker/0", role="worker").report()), read=decode_report),
    "a manifest": Kind(sound=manifest_message(), read=read_manifest, error=WeightsError),
    "a shard's record": Kind(
        sound=msgpack.unpackb(manifest_message())["shards"][0], read=decode_record, error=WeightsError
    ),
    "a blob's index": Kind(
        sound=pack({"num_bytes": 10, "chunk_bytes": 4, "digest": b"d" * 16, "whole": 1}),
        read=read_index,
        error=WeightsError,
    ),
}
EDGES = [0, 1, -1, 255, 1 << 16, 1 << 22, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
TEXTS = ["", "{}", "[]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "9" * 5000, '{"a":' * 5000, "\n" * 4096]
VALUES = st.recursive(
    st.sampled_from(EDGES)
    | st.sampled_from(TEXTS)
    | st.none()
    | st.booleans()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=64)
    | st.sampled_from([b"\xff" * 8, b"\xff" * 64, bytes(4096)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", KINDS)
def test_any_field_replaced_gives_what_was_read_or_the_one_error(name: str) -> None:
    kind = KINDS[name]
    sound = msgpack.unpackb(kind.sound)
    kind.read(kind.sound)

    @given(st.dictionaries(st.sampled_from(sorted(sound)), VALUES, min_size=1, max_size=3))
    @settings(max_examples=150, deadline=None)
    def check(changes: dict[str, Any]) -> None:
        with contextlib.suppress(kind.error):
            kind.read(msgpack.packb({**sound, **changes}))

    check()


@pytest.mark.parametrize("name", KINDS)
def test_a_number_that_lies_costs_no_memory(name: str) -> None:
    kind = KINDS[name]
    sound = msgpack.unpackb(kind.sound)
    numbers = [field for field, value in sound.items() if type(value) is int]
    tracemalloc.start()
    try:
        for field in numbers:
            for lie in EDGES:
                with contextlib.suppress(kind.error):
                    kind.read(msgpack.packb({**sound, field: lie}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < _MOST_BYTES


@given(
    st.lists(st.tuples(st.integers(0, 19), st.sampled_from([0, 1, 2, 3, 5, 257, 1 << 24, (1 << 64) - 1])), min_size=1)
)
@settings(max_examples=300, deadline=None)
def test_any_number_of_masks_versions_and_branches_replaced_gives_rows_that_can_be_laid(
    changes: list[tuple[int, int]],
) -> None:
    """What is read although it lies can be trained: each row is as long as it says, each token has one before it."""
    sound = msgpack.unpackb(BODY[NUM_RAW:])
    lists = [numbers for runs, spans, *_, branches in sound["rows"] for numbers in (runs, *spans, *branches)]
    places = [(numbers, at) for numbers in lists for at in range(len(numbers))]
    for place, value in changes:
        numbers, at = places[place % len(places)]
        numbers[at] = value
    try:
        group: Any = read_rows(msgpack.packb(sound))
    except WireError:
        return
    for sample in group.samples:
        rows = rows_of(GROUP.num_prompt_tokens, len(sample.token_ids), sample.branches)
        assert sum(map(len, rows)) == GROUP.num_prompt_tokens + 4 + sum(branch.keep for branch in sample.branches)
        for share in (True, False):
            laid = cells_of(
                num_prompt=GROUP.num_prompt_tokens, mask=sample.loss_mask(), branches=sample.branches, share=share
            )
            assert sorted(t for each in laid for t in each.trained) == np.flatnonzero(sample.loss_mask()).tolist()


FIELDS = st.dictionaries(st.sampled_from([b"n", b"u", b"h", b"b", b"uid", b"term", b"config", b"state"]), st.binary())


@given(st.binary(min_size=1).filter(bytes.isascii), FIELDS)
def test_any_entry_of_a_stream_and_any_word_of_a_run_is_read(entry_id: bytes, fields: dict[bytes, bytes]) -> None:
    to_entry(entry_id, fields)
    to_present("train", "uid", entry_id, fields)
    to_run_info("run", fields)
