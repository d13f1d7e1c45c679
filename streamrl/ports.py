"""Taking a port to listen on, before anything slow is done: a port that is taken shows at once."""

from __future__ import annotations

import socket

from streamrl.errors import ResourceError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int, *, what: str) -> socket.socket:
    """Port 0: any free one. `what` names in an error who wanted it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # The protocol by name: asyncio sends without delay only where it sees TCP, else an answer takes 40 ms more.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ResourceError(f"{what}: no such host {host!r}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ResourceError(
            f"{what}: cannot take port {port} of {host}: {error.strerror}; choose another one, or 0 for any free one"
        ) from None
    return bound


def address_of(bound: socket.socket, *, host: str | None = None) -> str:
    """HOST:PORT as a URL has it; the host as it was asked for, by default what the socket says."""
    found, port = bound.getsockname()[:2]
    host = host or found
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
