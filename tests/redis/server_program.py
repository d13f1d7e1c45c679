"""The server program on a port of its own, for what the server of all tests cannot be: guarded, or a sentinel."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.config import schema
from streamrl.process import free_port
from streamrl.protocol.transport.embedded import find_server

SETTINGS = schema.Redis(connect_timeout_s=2.0, reply_timeout_s=5.0)
SECRET = "s3cret/with:signs@"  # of the user `part`


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A server that knows only the user `part`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://part@127.0.0.1:{self.port}"


@contextlib.contextmanager
def serve(folder: Path, *words: str, config: str = "") -> Iterator[Guarded]:
    """The server program on a port of its own, as it is told; gone with the context."""
    port = free_port("127.0.0.1")
    file = folder / f"{port}.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsave ''\n{config}")
    process = subprocess.Popen([str(find_server()), str(file), *words], stdout=subprocess.DEVNULL)
    try:
        yield Guarded(port=port, process=process)
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    at_once = Retry(NoBackoff(), 0)
    with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port, protocol=2, retry=at_once) as client:
        with contextlib.suppress(redis.AuthenticationError):
            client.ping()
        return True
    return False
