"""Sends one request to a peer: HTTP/1.1, as much of it as `door` speaks, with a known response length.

No HTTP library, because peers are not trusted, and a library reads heads and bodies of any length. Here `_SILENCE_S`
without data ends a request, and the deadline ends it in any case. Blocks for as long.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from streamrl.errors import TransportError

_SILENCE_S = 2.0
_MAX_HEAD_BYTES = 16 << 10
_MAX_OTHER_BYTES = 1 << 10  # of a response that is not a piece
_READ_BYTES = 256 << 10


class WrongLength(Exception):
    """The announced length is not the piece's, which is known before the body is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytearray


class Connection:
    """A connection to one peer, reused for further requests. After an OSError or TransportError it is unusable."""

    def __init__(self, address: tuple[str, int], *, own_host: str) -> None:
        # Bind to the address that other hosts know, so that a host in several networks uses that of its peers.
        self._socket = socket.create_connection(address, timeout=_SILENCE_S, source_address=(own_host, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"

    def get(self, path: str, *, token: str, num_bytes: int, deadline: float) -> Answer:
        """Send a GET request. `num_bytes` is the length that a 200 response must have."""
        self._wait_until(deadline)
        head = f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {token}\r\n\r\n"
        self._socket.sendall(head.encode())
        status, headers, rest = self._head(deadline)
        length = headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 20:
            raise TransportError("an answer has no valid content-length")
        if status == 200 and int(length) != num_bytes:
            raise WrongLength
        if int(length) > max(num_bytes, _MAX_OTHER_BYTES) or len(rest) > int(length):
            raise TransportError("an answer is longer than allowed")
        body = bytearray(int(length))
        body[: len(rest)] = rest
        view, num_read = memoryview(body), len(rest)
        while num_read < len(body):
            self._wait_until(deadline)
            num = self._socket.recv_into(view[num_read : num_read + _READ_BYTES])
            if not num:
                raise TransportError("the connection ended in the middle of an answer")
            num_read += num
        return Answer(status=status, headers=headers, body=body)

    def close(self) -> None:
        self._socket.close()

    def _head(self, deadline: float) -> tuple[int, dict[str, str], bytes]:
        read = b""
        while b"\r\n\r\n" not in read:
            self._wait_until(deadline)
            part = self._socket.recv(_MAX_HEAD_BYTES)
            if not part:
                raise ConnectionResetError("the connection ended before an answer")
            read += part
            if b"\r\n\r\n" not in read and len(read) > _MAX_HEAD_BYTES:
                raise TransportError("the head of an answer is too long")
        head, _, rest = read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise TransportError("the answer is not HTTP")
        pairs = (line.partition(":") for line in lines)
        return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}, rest

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransportError("the answer took too long")
        self._socket.settimeout(min(left_s, _SILENCE_S))
