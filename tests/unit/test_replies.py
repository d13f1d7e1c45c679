"""Our parsers of replies give what was sent, however the bytes come."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from streamrl.transport.replies import PageParser, ReplyParser

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
    socket_timeout = 5.0

    def __init__(self, *, reader: asyncio.StreamReader | None = None, sock: socket.socket | None = None) -> None:
        self._reader, self._sock = reader, sock


async def parsed_by_a_worker(pieces: Sequence[bytes], *, num_replies: int = 1) -> list[Any]:
    """The connection ends behind the pieces, which come one by one, as fast as the parser takes them."""
    reader, parser = asyncio.StreamReader(), ReplyParser(socket_read_size=1 << 16)
    parser.on_connect(Connected(reader=reader))

    async def come() -> None:
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()

    coming = asyncio.create_task(come())
    replies = [await parser.read_response() for _ in range(num_replies)]
    await coming
    return replies


def parsed_by_rank_0(pieces: Sequence[bytes], *, num_replies: int = 1) -> list[Any]:
    theirs, ours = socket.socketpair()
    parser = PageParser(socket_read_size=1 << 16)
    parser.on_connect(Connected(sock=ours))

    def come() -> None:
        with theirs:
            for piece in pieces:
                theirs.sendall(piece)

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    with ours:
        replies = [parser.read_response() for _ in range(num_replies)]
        coming.join()
    return replies


def parsed(pieces: Sequence[bytes], *, num_replies: int = 1) -> list[Any]:
    """By both of them."""
    replies = asyncio.run(parsed_by_a_worker(pieces, num_replies=num_replies))
    assert parsed_by_rank_0(pieces, num_replies=num_replies) == replies
    return replies


@given(st.lists(REPLIES, min_size=1, max_size=4), st.integers(1, 30))
def test_replies_are_what_was_sent_in_whatever_pieces_they_come(replies: list[Any], size: int) -> None:
    sent = b"".join(map(on_the_wire, replies))
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert parsed(pieces, num_replies=len(replies)) == replies


def test_large_blobs_come_whole() -> None:
    sizes = (300_000, 900_000, 3_000_000, 40_000)  # beyond what there is room for at first, too
    blobs = [bytes(range(256)) * (size // 256) for size in sizes]
    sent = on_the_wire([1, *blobs])
    pieces = [sent[at : at + 50_000] for at in range(0, len(sent), 50_000)]
    assert parsed([*pieces, on_the_wire(2)], num_replies=2) == [[1, *blobs], 2]


@pytest.mark.parametrize("size", [1, 1000])
def test_words_and_errors_are_told_apart(size: int) -> None:
    sent = b"+OK\r\n*2\r\n-NOGROUP no such\r\n:1\r\n"
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    for word, [error, number] in (
        asyncio.run(parsed_by_a_worker(pieces, num_replies=2)),
        parsed_by_rank_0(pieces, num_replies=2),
    ):
        assert (word, number) == (b"OK", 1)
        assert isinstance(error, redis.ResponseError)
        assert str(error).startswith("NOGROUP")


BEGUN = {"nothing": b"", "kind": b"$5", "blob": b"$5\r\nab", "list": b"*2\r\n:1\r\n", "large": b"$100000\r\nab"}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN.keys())
def test_a_connection_that_ends_within_a_reply_is_a_connection_error(begun: bytes) -> None:
    with pytest.raises(redis.ConnectionError):
        asyncio.run(parsed_by_a_worker([begun]))
    with pytest.raises(redis.ConnectionError):
        parsed_by_rank_0([begun])


def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(redis.InvalidResponse):
        asyncio.run(parsed_by_a_worker([b"?what\r\n"]))
    with pytest.raises(redis.InvalidResponse):
        parsed_by_rank_0([b"?what\r\n"])
