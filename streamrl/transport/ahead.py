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


class PagedReader:
    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._reached = ""  # id of the last entry handed out
        self._page: list[Any] = []  # behind it, and here already
        self._asked: redis.Connection | None = None  # brings the page behind that

    def read(self, *, after: str, count: int, block_ms: int | None) -> list[Any]:
        """Up to `count` entries behind this id, as the client gives them."""
        if after != self._reached:
            self.forget()
        if self._asked is not None:
            self._page = self._collect(self._asked)
        if not self._page:
            self._page = _entries(self._client.xread({self._stream: after}, count=count, block=block_ms))
        handed_out, self._page = self._page[:count], self._page[count:]
        if handed_out:
            self._reached = handed_out[-1][0].decode()
        if len(handed_out) == count and not self._page:  # or else the reader is faster, and nothing lies there yet
            self._ask(count)
        return handed_out

    def forget(self) -> None:
        """What was read ahead may be of another time."""
        self._page = []
        if self._asked is not None:
            self._asked.disconnect()  # type: ignore[no-untyped-call]
            self._let_go(self._asked)

    def _ask(self, count: int) -> None:
        self._asked = self._client.connection_pool.get_connection()
        words = ("XREAD", "COUNT", count, "STREAMS", self._stream, self._reached)
        self._asked.send_command(*words)  # type: ignore[no-untyped-call]

    def _collect(self, asked: redis.Connection) -> list[Any]:
        try:
            return _entries(self._client.parse_response(asked, "XREAD"))  # type: ignore[no-untyped-call]
        finally:
            self._let_go(asked)

    def _let_go(self, asked: redis.Connection) -> None:
        self._asked = None
        self._client.connection_pool.release(asked)


def _entries(reply: Any) -> list[Any]:
    """Of the only stream that was read."""
    return list(reply[0][1]) if reply else []
