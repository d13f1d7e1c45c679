"""The worker's parser of replies gives what the client's own gives, however the bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from streamrl.transport.replies import ReplyParser

REPLIES = st.recursive(
    st.none() | st.integers(-(2**62), 2**62) | st.binary(max_size=40), lambda parts: st.lists(parts, max_size=5)
)


def on_the_wire(reply: Any) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(on_the_wire, reply)))


class Connected:
    """What a parser uses of its connection."""

    encoder = None

    def __init__(self) -> None:
        self._reader = asyncio.StreamReader()


async def parsed(pieces: Sequence[bytes], *, num_replies: int = 1) -> list[Any]:
    """The connection ends behind the pieces, which come one by one, as fast as the parser takes them."""
    connection, parser = Connected(), ReplyParser(socket_read_size=1 << 16)
    parser.on_connect(connection)

    async def come() -> None:
        for piece in pieces:
            connection._reader.feed_data(piece)
            await asyncio.sleep(0)
        connection._reader.feed_eof()

    coming = asyncio.create_task(come())
    replies = [await parser.read_response() for _ in range(num_replies)]
    await coming
    return replies


@given(st.lists(REPLIES, min_size=1, max_size=4), st.integers(1, 30))
def test_replies_are_what_was_sent_in_whatever_pieces_they_come(replies: list[Any], size: int) -> None:
    sent = b"".join(map(on_the_wire, replies))
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert asyncio.run(parsed(pieces, num_replies=len(replies))) == replies


async def test_a_large_blob_comes_whole() -> None:
    blob = bytes(range(256)) * 4096
    sent = on_the_wire([1, blob])
    pieces = [sent[at : at + 50_000] for at in range(0, len(sent), 50_000)]
    assert await parsed([*pieces, on_the_wire(2)], num_replies=2) == [[1, blob], 2]


async def test_words_and_errors_are_told_apart() -> None:
    word, [error, number] = await parsed([b"+OK\r\n*2\r\n-NOGROUP no such\r\n:1\r\n"], num_replies=2)
    assert (word, number) == (b"OK", 1)
    assert isinstance(error, redis.ResponseError)
    assert str(error).startswith("NOGROUP")


@pytest.mark.parametrize(
    "begun",
    [b"", b"$5", b"$5\r\nab", b"*2\r\n:1\r\n", b"$100000\r\nab"],
    ids=["nothing", "kind", "blob", "list", "large"],
)
async def test_a_connection_that_ends_within_a_reply_is_a_connection_error(begun: bytes) -> None:
    with pytest.raises(redis.ConnectionError):
        await parsed([begun])


async def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(redis.InvalidResponse):
        await parsed([b"?what\r\n"])
