"""Tickets on the wire."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import MAX_TEXT_CHARS
from streamrl.protocol.wire.ticket import (
    IDENTITY_CHARS,
    MAX_SAMPLES,
    MAX_TICKET_BYTES,
    MAX_TOKENS,
    Ticket,
    decode_ticket,
    encode_ticket,
)
from tests.helpers import make_ticket

JSON_ROWS = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    ),
    max_size=4,
)
TICKETS = st.builds(
    lambda **fields: Ticket(**fields),
    number=st.integers(0, 2**63),
    run_uid=st.text(max_size=64),
    purpose=st.sampled_from(["train", "eval"]),
    data_epoch=st.integers(0, 2**31),
    prompt_index=st.integers(0, 2**40),
    prompt=st.text(),
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50).map(lambda ids: np.array(ids, np.int32)),
    fields=JSON_ROWS,
    num_samples=st.integers(1, MAX_SAMPLES),
    attempt=st.integers(0, 1000),
    issued_step=st.integers(0, 2**40),
    min_version=st.integers(0, 2**63),
    retry_of=st.none() | st.integers(0, 2**63),
)


def as_plain(ticket: Ticket) -> dict[str, Any]:
    return {**asdict(ticket), "identity": ticket.identity, "token_ids": ticket.token_ids.tolist()}


def test_a_ticket_issued_again_is_the_same_and_one_that_asks_for_anything_else_is_another() -> None:
    ticket = make_ticket(5, fields={"answer": 1}, retry_of=2)
    again = {"attempt": 1, "issued_step": 9, "min_version": 7}
    assert {replace(ticket, **{name: value}).identity for name, value in again.items()} == {ticket.identity}
    others: dict[str, Any] = {
        "number": 6,
        "run_uid": "another",
        "purpose": "eval",
        "data_epoch": 1,
        "prompt_index": 6,
        "prompt": "prompt 6",
        "token_ids": np.arange(4, dtype=np.int32),
        "fields": {"answer": 2},
        "num_samples": 3,
        "retry_of": None,
    }
    identities = {replace(ticket, **{name: value}).identity for name, value in others.items()}
    assert len(identities | {ticket.identity}) == 1 + len(others)
    assert set(again) | set(others) == set(asdict(ticket))
    assert len(ticket.identity) == IDENTITY_CHARS


@given(TICKETS)
def test_a_ticket_survives_the_wire(ticket: Ticket) -> None:
    assert as_plain(decode_ticket(encode_ticket(ticket))) == as_plain(ticket)


def test_the_largest_prompt_that_a_ticket_may_have_fits_into_one() -> None:
    wide = "\U0001f600"
    largest = make_ticket(
        0,
        prompt=wide * MAX_TEXT_CHARS,
        fields={"x": wide * (MAX_TEXT_CHARS - len('{"x":""}'))},
        token_ids=np.full(MAX_TOKENS, 2**31 - 1, np.int32),
    )
    data = encode_ticket(largest)
    assert len(decode_ticket(data).fields["x"]) == MAX_TEXT_CHARS - 8
    assert MAX_TICKET_BYTES - (1 << 20) < len(data) <= MAX_TICKET_BYTES
    with pytest.raises(WireError, match=f"a ticket carries {MAX_TEXT_CHARS}"):
        encode_ticket(make_ticket(0, fields={"x": "x" * MAX_TEXT_CHARS}))


def unpacked(data: bytes) -> dict[str, Any]:
    """All fields, of both maps."""
    issued = msgpack.unpackb(data)
    return msgpack.unpackb(issued.pop("asked")) | issued


def packed(fields: dict[str, Any]) -> bytes:
    """What `unpacked` gives, or what is left of it; what is in neither map goes into the inner one."""
    outer = {name: fields[name] for name in ("schema", *_OUTER) if name in fields}
    inner = {name: value for name, value in fields.items() if name not in _OUTER}
    return msgpack.packb({**outer, "asked": msgpack.packb(inner)})


_OUTER = ("attempt", "issued_step", "min_version")


@pytest.mark.parametrize(
    "change",
    [
        {"number": -1},
        {"number": "1"},
        {"purpose": "war"},
        {"token_ids": b""},
        {"token_ids": b"\x00" * 11},
        {"num_samples": 0},
        {"num_samples": MAX_SAMPLES + 1},
        {"fields": "[]"},
        {"fields": "{"},
        {"fields": "[" * 100_000},
        {"run_uid": "u" * 65},
        {"retry_of": -2},
        {"attempt": 1.5},
        {"extra": 1},
    ],
)
def test_a_ticket_that_breaks_the_schema_is_one_wire_error(change: dict[str, object]) -> None:
    fields = unpacked(encode_ticket(make_ticket(0)))
    assert decode_ticket(packed(fields)).number == 0
    with pytest.raises(WireError):
        decode_ticket(packed({**fields, **change}))


def test_each_field_of_a_ticket_is_needed() -> None:
    fields = unpacked(encode_ticket(make_ticket(0)))
    for missing in fields:
        rest = {name: value for name, value in fields.items() if name != missing}
        with pytest.raises(WireError, match="missing"):
            decode_ticket(packed(rest))


@given(st.integers(0), st.integers(0, 255))
def test_a_ticket_with_one_byte_changed_is_a_ticket_or_one_wire_error(place: int, byte: int) -> None:
    data = bytearray(encode_ticket(make_ticket(3, fields={"answer": [1, 2]})))
    data[place % len(data)] = byte
    with contextlib.suppress(WireError):
        decode_ticket(bytes(data))


@given(st.integers(0))
def test_a_ticket_cut_short_is_one_wire_error(length: int) -> None:
    data = encode_ticket(make_ticket(3))
    with pytest.raises(WireError):
        decode_ticket(data[: length % len(data)])
