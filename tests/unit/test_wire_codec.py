"""The codec under honest and hostile bytes: fields, or one WireError; never another error, never much memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, Fields, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=20
)


TAKE: dict[str, Callable[[Fields, str], object]] = {
    "integer": Fields.integer,
    "number": Fields.number,
    "text": Fields.text,
    "blob": Fields.blob,
    "list": lambda f, name: f.list(name, int),
}


@given(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.binary())
def test_what_is_packed_is_unpacked(integer: int, number: float, text: str, blob: bytes) -> None:
    f = unpack(pack({"integer": integer, "number": number, "text": text, "blob": blob, "list": [1]}))
    assert (f.integer("integer"), f.number("number"), f.text("text"), f.blob("blob")) == (integer, number, text, blob)
    assert f.list("list", int) == [1]
    f.done()


@given(st.binary(max_size=300))
def test_any_bytes_give_fields_or_one_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        unpack(data)


@given(VALUES)
def test_any_message_of_another_program_gives_fields_or_one_wire_error(value: object) -> None:
    try:
        f = unpack(msgpack.packb(value))
        for take in TAKE.values():
            for name in value if isinstance(value, dict) else ():
                with contextlib.suppress(WireError):
                    take(f, name)
    except WireError:
        pass


def message(field: bytes) -> bytes:
    """Sound but for the field x, which is given as raw bytes."""
    return b"\x82\xa6schema\x04\xa1x" + field


def empty_maps(num_bytes: int) -> bytes:
    """Lists of empty maps: each byte becomes an object of 64 bytes."""
    inner = b"\xdc\x0f\xff" + b"\x80" * 4095
    return b"\xdc\x0f\xff" + inner * min(4095, num_bytes // len(inner))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(message(empty_maps(8 << 20)), id="maps within lists"),
        pytest.param(message(b"\xdd" + (8 << 20).to_bytes(4, "big") + b"\x80" * (8 << 20)), id="a long list of maps"),
        pytest.param(message(b"\xdf" + (1 << 30).to_bytes(4, "big") + b"\xa1x\x01" * 100), id="a map that lies"),
        pytest.param(message(b"\xdd\xff\xff\xff\xff" * 50), id="lists that lie about their size"),
        pytest.param(message(b"\x81\xa1x" * 100_000 + b"\x01"), id="maps within maps"),
        pytest.param(message(b"\x91" * 100_000), id="lists within lists"),
        pytest.param(message(b"\xc6\xff\xff\xff\xff"), id="a blob that lies about its size"),
        pytest.param(message(b"\xdb\xff\xff\xff\xff"), id="a text that lies about its size"),
        pytest.param(b"\x83\xa6schema\x04\xa1x\x01\xa1x\x02", id="a key that comes twice"),
        pytest.param(message(b"\x82\xa1y\x01\xa1y\x02"), id="a key that comes twice further down"),
        pytest.param(b"\x82\xa6schema\x04\x01\x02", id="a key that is no text"),
        pytest.param(b"\x82\xa6schema\x04\xa1\xff\x02", id="a key that is no unicode"),
        pytest.param(message(b"\xc7\x01\x05\x00"), id="an extension"),
        pytest.param(message(b"\x01") + b"\x00", id="bytes after the end"),
        pytest.param(msgpack.packb({"schema": 1}), id="another schema"),
        pytest.param(msgpack.packb({"schema": True}), id="a schema that is no number"),
        pytest.param(msgpack.packb([1]), id="no map"),
    ],
)
def test_a_bomb_is_one_wire_error_and_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("take", TAKE)
def test_a_timestamp_is_the_value_of_no_field(take: str) -> None:
    """The one extension that the library reads by itself."""
    f = unpack(message(b"\xd6\xff\x00\x00\x00\x00"))
    with pytest.raises(WireError):
        TAKE[take](f, "x")


def test_the_messages_around_the_bombs_are_sound() -> None:
    assert unpack(message(b"\x07")).integer("x") == 7


def test_a_message_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="exceeds the limit"):
        unpack(bytes(MAX_MESSAGE_BYTES + 1))


def test_what_is_left_over_is_refused() -> None:
    with pytest.raises(WireError, match="unknown fields: 'unknown'"), unpack(pack({"known": 1, "unknown": 2})) as f:
        f.integer("known")


def test_what_is_wrong_in_a_field_is_said_before_what_is_left_over() -> None:
    with pytest.raises(WireError, match="'known'"), unpack(pack({"known": "x", "unknown": 2})) as f:
        f.integer("known")


@pytest.mark.parametrize(
    ("value", "method"),
    [
        (True, "integer"),
        (1.0, "integer"),
        (float("nan"), "number"),
        (float("inf"), "number"),
        (True, "number"),
        (b"x", "text"),
        ("x", "blob"),
        ({}, "list"),
        (["1"], "list"),
        ([True], "list"),
    ],
)
def test_a_field_of_another_type_is_refused(value: object, method: str) -> None:
    with pytest.raises(WireError, match="'x'"):
        TAKE[method](unpack(pack({"x": value})), "x")


def test_an_array_must_have_just_its_bytes() -> None:
    packed = pack({"x": b"\x00" * 12})
    assert unpack(packed).array("x", "<i4", count=3).tolist() == [0, 0, 0]
    for count in (2, 4):
        with pytest.raises(WireError, match="12 bytes"):
            unpack(packed).array("x", "<i4", count=count)
