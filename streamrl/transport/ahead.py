"""Reading a stream in pages, one of them ahead: the server makes it ready while its reader looks at the one before.

    read ──► page ──► the reader is busy with it ──► read ──► page ──► ...
                └ the next one is asked for ──── it comes ────┘

What was asked for ahead is what a read at that moment would have given, and is handed out only to a reader who goes on
from where it stopped. Reading changes nothing, so any call may be repeated. Blocks at most `block_ms`, or until the
reply times out; errors come out as they are.
"""

from __future__ import annotations

from typing import Any

import redis

from streamrl.transport.replies import PageParser


class PagedReader:
    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._connection: redis.Connection | None = None  # our own, for what is read ahead
        self._reached = ""  # id of the last entry handed out
        self._page: list[Any] = []  # what is behind it, and has come
        self._asked = False  # for the page behind that

    def read(self, *, after: str, count: int, block_ms: int | None) -> list[Any]:
        """Up to `count` entries behind this id, as the client gives them."""
        if after != self._reached:
            self.forget()
        if self._asked:
            self._page = self._collect()
        if not self._page:
            self._page = _entries(self._client.xread({self._stream: after}, count=count, block=block_ms))
        handed_out, self._page = self._page[:count], self._page[count:]
        if handed_out:
            self._reached = handed_out[-1][0].decode()
        if len(handed_out) == count and not self._page:  # or else the reader is faster, and nothing lies there yet
            self._ask(count)
        return handed_out

    def forget(self) -> None:
        """What was read ahead may be of another time, or of another server."""
        self._reached, self._page, self._asked = "", [], False
        if self._connection is not None:
            self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _ask(self, count: int) -> None:
        if self._connection is None:
            # None of the pool's: a reader that is left in the midst of a page would not give it back.
            pool = self._client.connection_pool
            self._connection = pool.connection_class(**{**pool.connection_kwargs, "parser_class": PageParser})
        words = ("XREAD", "COUNT", count, "STREAMS", self._stream, self._reached)
        self._connection.send_command(*words)
        self._asked = True

    def _collect(self) -> list[Any]:
        assert self._connection is not None, "it was asked through it"
        self._asked = False
        return _entries(self._client.parse_response(self._connection, "XREAD"))  # type: ignore[no-untyped-call]


def _entries(reply: Any) -> list[Any]:
    """Of the only stream that was read."""
    return list(reply[0][1]) if reply else []
