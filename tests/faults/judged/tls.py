"""TLS for a server that may have been built without it: a port that speaks TLS, and behind it the server's socket.

Each run gets its own certificate for 127.0.0.1. A thread forwards the bytes; if the server is away, the client's
connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16
_WITHIN_S = 30.0


def make_certificate(folder: Path, *, of: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Return (certificate, key)."""
    certificate, key = folder / "server.crt", folder / "server.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", f"/CN={of.partition(':')[2]}", "-addext", f"subjectAltName={of}"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


class TlsRoad:
    def __init__(self, socket: Path, folder: Path) -> None:
        """`folder`: for its certificate, used by nothing else."""
        self._socket = socket
        folder.mkdir(exist_ok=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.certificate = self.present(folder)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name="TLS road", daemon=True)

    def present(self, folder: Path) -> Path:
        """Create a certificate there, and present it to new connections from now on."""
        certificate, key = make_certificate(folder)
        self._context.load_cert_chain(certificate, key)
        return certificate

    def url_of(self, user: str, *, authority: Path | None = None) -> str:
        return f"rediss://{user}@127.0.0.1:{self.port}?ssl_ca_certs={authority or self.certificate}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(_WITHIN_S), "the TLS road does not open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_WITHIN_S)
        assert not self._thread.is_alive(), "the TLS road does not close"

    def _live(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    async def _carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        to_server: asyncio.StreamWriter | None = None
        try:
            server, to_server = await asyncio.open_unix_connection(str(self._socket))
            ways = [asyncio.create_task(_pump(client, to_server)), asyncio.create_task(_pump(server, to_client))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        except OSError:
            pass  # the server is away
        finally:
            for writer in (to_client, to_server):
                if writer is not None:
                    writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
