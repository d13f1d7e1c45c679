"""TLS to a Redis. The server that comes with the tests is built without it, so a proxy in front of it speaks TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.tasks import cancel_all, close_server
from tests.redis.server_program import SETTINGS, Guarded


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, public = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        *names,
    ]
    subprocess.run([*make, "-keyout", key, "-out", public], check=True, capture_output=True, timeout=240)
    return key, public


@pytest.fixture
def tls_port(certificate: tuple[Path, Path], redis_server: EmbeddedRedis) -> Iterator[int]:
    key, public = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    path = redis_server.url.removeprefix("unix://")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a client that refuses the certificate is what a test wants

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()
        except (OSError, asyncio.CancelledError):
            sink.transport.abort()

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(through, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, name="tls proxy")
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()

    async def end() -> None:
        await close_server(server)
        await cancel_all(list(asyncio.all_tasks() - {asyncio.current_task()}))
        await asyncio.sleep(0)  # the loop closes the sockets of closed writers in its next turn

    loop.run_until_complete(end())
    loop.close()


async def test_tls_checks_the_server_against_the_authority_that_the_url_names(
    tls_port: int, certificate: tuple[Path, Path]
) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={certificate[1]}"
    with connect(url, SETTINGS) as client:
        assert client.ping()
    async with connect_async(url, SETTINGS) as client:
        assert await client.ping()


def test_tls_that_does_not_work_says_what_would(tls_port: int, guarded: Guarded) -> None:
    settings = schema.Redis(connect_timeout_s=3.0, reply_timeout_s=0.3)
    with pytest.raises(ResourceError, match="ssl_ca_certs=FILE"):
        connect(f"rediss://127.0.0.1:{tls_port}", settings)
    with pytest.raises(ResourceError, match="check TLS, which only one side may be using"):
        connect(f"rediss://127.0.0.1:{guarded.port}", settings)
    with pytest.raises(ResourceError, match="ssl_ca_certs=FILE"):
        connect(f"rediss://127.0.0.1:{tls_port}", settings, patience_s=0.3)
