"""Replies of Redis as a worker reads them: a lease brings many small parts, and the parser that comes with the client
awaits each of them by itself, which was a quarter of what a ticket cost its worker.

Here what has come is parsed in one go, and begun anew when it was not all: a reply is small, or it is one large blob,
whose length is known and awaited first. RESP2 without decoding, as `connection` opens its connections. Blocks as the
connection does, which bounds it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis
from redis._parsers import _AsyncRESP2Parser

_READ_BYTES = 1 << 16


class _Lacking(Exception):
    """The reply goes on behind what has come."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at least


class ReplyParser(_AsyncRESP2Parser):
    """The client's own, but for how it reads."""

    async def read_response(self, disable_decoding: bool = False) -> Any:
        if not self._connected:
            raise redis.ConnectionError("Connection closed by server.")
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
            raise redis.ConnectionError("Connection closed by server.")
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
