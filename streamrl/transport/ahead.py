"""Reading a stream in pages, one of them ahead: the server makes it ready while its reader looks at the one before.

    read ──► page ──► the reader is busy with it ──► read ──► page ──► ...
                └ the next one is asked for ──── it comes ────┘

What was asked for ahead is what a read at that moment would have given, and is handed out only to a reader who goes on
from where it stopped. Reading changes nothing, so any call may be repeated. Blocks at most `block_ms`, or until the
reply times out; errors come out as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import redis


class PagedReader:
    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        # None of the pool's: a reader that is left in the midst of a page would not give it back.
        pool = client.connection_pool
        self._connection = pool.connection_class(**pool.connection_kwargs)
        weakref.finalize(self, self._connection.disconnect)  # or the collector finds its socket open, and complains
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
            self._ask(after, count, *(() if block_ms is None else ("BLOCK", block_ms)))
            self._page = self._collect()
        handed_out, self._page = self._page[:count], self._page[count:]
        if handed_out:
            self._reached = handed_out[-1][0].decode()
        if len(handed_out) == count and not self._page:  # or else the reader is faster, and nothing lies there yet
            self._ask(self._reached, count)
        return handed_out

    def forget(self) -> None:
        """What was read ahead may be of another time, or of another server."""
        self._reached, self._page, self._asked = "", [], False
        self._connection.disconnect()

    def _ask(self, after: str, count: int, *block: str | int) -> None:
        self._connection.connect()  # a sentinel's finds the master in this alone
        self._connection.send_command("XREAD", "COUNT", count, *block, "STREAMS", self._stream, after)
        self._asked = True

    def _collect(self) -> list[Any]:
        self._asked = False
        reply: Any = self._client.parse_response(self._connection, "XREAD")  # type: ignore[no-untyped-call]
        return list(reply[0][1]) if reply else []
