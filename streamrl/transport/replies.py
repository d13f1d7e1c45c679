"""Replies of Redis, parsed with less work than the parsers that come with the client need (RESP2, without decoding).

A worker's leases have many small parts, and the client awaits each by itself, which was a quarter of what a ticket cost
its worker. `ReplyParser` parses what has come in one go, and begins anew when it was not all: a reply is small, or it
is one large blob, whose length is known and awaited first.

Rank 0's pages have few and large parts, and the client copies each five times, through buffers that it makes anew.
`PageParser` receives into one place that it keeps, and copies each part out of it once.

Both block as their connections do, which bound it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis
from redis._parsers import _AsyncRESP2Parser, _RESP2Parser

_READ_BYTES = 1 << 16
_PAGE_BYTES = 1 << 20  # of room at first; it grows with the largest part
_CLOSED = "Connection closed by server."


class PageParser(_RESP2Parser):
    """The client's own for whole replies, one at a time."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._room = bytearray(_PAGE_BYTES)
        self._start = self._end = 0  # of what has come and is not parsed

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._start = self._end = 0

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Any:
        """The connection's own timeout bounds it."""
        reply = self._parse()
        if isinstance(reply, redis.ConnectionError):
            raise reply
        return reply

    def _parse(self) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if (num_bytes := int(rest)) < 0 else self._blob(num_bytes)
        if kind == b"*":
            return None if (num_parts := int(rest)) < 0 else [self._parse() for _ in range(num_parts)]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return self.parse_error(rest.decode("utf-8", errors="replace"))  # type: ignore[no-untyped-call]
        raise redis.InvalidResponse(f"Protocol Error: {line!r}")

    def _line(self) -> bytes:
        while (end := self._room.find(b"\r\n", self._start, self._end)) < 0:
            self._receive(self._end - self._start + 1)
        line = bytes(self._room[self._start : end])
        self._start = end + 2
        return line

    def _blob(self, num_bytes: int) -> bytes:
        self._receive(num_bytes + 2)
        end = self._start + num_bytes
        with memoryview(self._room) as room:
            blob = bytes(room[self._start : end])
        self._start = end + 2
        return blob

    def _receive(self, num_bytes: int) -> None:
        """Until so many bytes have come that are not parsed."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + num_bytes > len(self._room):
            left = self._room[self._start : self._end]
            self._start, self._end = 0, len(left)
            self._room[: self._end] = left
            self._room.extend(bytes(max(0, num_bytes - len(self._room))))
        assert self._sock is not None, "it is connected"
        with memoryview(self._room) as room:
            while self._end - self._start < num_bytes:
                num_received = self._sock.recv_into(room[self._end :])
                if not num_received:
                    raise redis.ConnectionError(_CLOSED)
                self._end += num_received


class _Lacking(Exception):
    """The reply goes on behind what has come."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at least


class ReplyParser(_AsyncRESP2Parser):
    """The client's own, but for how it reads."""

    async def read_response(self, disable_decoding: bool = False) -> Any:
        if not self._connected:
            raise redis.ConnectionError(_CLOSED)
        while True:
            try:
                reply, end = self._parse(0)
            except _Lacking as lacking:
                self._buffer += await self._more(lacking.num_bytes)
            else:
                self._buffer = self._buffer[end:]
                if isinstance(reply, redis.ConnectionError):
                    raise reply
                return reply

    async def _more(self, num_bytes: int) -> bytes:
        assert self._stream is not None, "it is connected"
        try:
            if num_bytes > _READ_BYTES:
                return await self._stream.readexactly(num_bytes)
            data = await self._stream.read(_READ_BYTES)
        except asyncio.IncompleteReadError:
            data = b""
        if not data:
            raise redis.ConnectionError(_CLOSED)
        return data

    def _parse(self, start: int) -> tuple[Any, int]:
        """(the reply or the part of one that begins here, where it ends)"""
        buffer = self._buffer
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            raise _Lacking(1)
        kind, line, end = buffer[start : start + 1], buffer[start + 1 : line_end], line_end + 2
        if kind == b"$":
            return self._blob(int(line), end)
        if kind == b"*":
            return self._list(int(line), end)
        if kind == b":":
            return int(line), end
        if kind == b"+":
            return line, end
        if kind == b"-":
            return self.parse_error(line.decode("utf-8", errors="replace")), end  # type: ignore[no-untyped-call]
        raise redis.InvalidResponse(f"Protocol Error: {buffer[start:line_end]!r}")

    def _blob(self, num_bytes: int, start: int) -> tuple[bytes | None, int]:
        if num_bytes < 0:
            return None, start
        end = start + num_bytes
        if len(self._buffer) < end + 2:
            raise _Lacking(end + 2 - len(self._buffer))
        return self._buffer[start:end], end + 2

    def _list(self, num_parts: int, start: int) -> tuple[list[Any] | None, int]:
        if num_parts < 0:
            return None, start
        parts, end = [], start
        for _ in range(num_parts):
            part, end = self._parse(end)
            parts.append(part)
        return parts, end
