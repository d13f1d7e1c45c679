"""Serves pieces of weights to other hosts over HTTP: `GET /pieces/DIGEST/NUMBER` returns one, `GET /pieces/DIGEST`
which ones are here.

Only blobs that this worker has announced (`offer`) are served, from the host's share: a path names a digest and a
number, never a file. A caller proves that it has read the run's secret in Redis, with a token for this address and path
only; so an address that does not belong to the run learns nothing from being asked. At most `MAX_UPLOADS` pieces are
sent at a time, each within `_UPLOAD_S`; further requests get 503. It runs in its own thread and event loop, so that
generation and serving do not block each other.

No TLS: the content is the run's weights, not a secret, and the receiver verifies it. Where others can listen in, use a
network of the workers' own.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from streamrl import web
from streamrl.errors import ResourceError
from streamrl.process import address_of
from streamrl.protocol.transport.peers import HAVE, bitmap_of, token
from streamrl.protocol.weights.manifest import ShardRecord
from streamrl.workers.sharing.host import HostShare

MAX_UPLOADS = 6
_UPLOAD_S = 30.0
_MAX_OFFERS = 256  # blobs, newest first
_SENT_BYTES = 256 << 10  # per write, so that a slow reader does not hold a whole piece in memory
_DIGEST, _NUMBER = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9]{1,9}")
_STARTS_WITHIN_S = 10.0


class Door:
    def __init__(self, host: HostShare, *, run_uid: str, address: str) -> None:
        self.address = address
        self.secret = b""  # the run's, from Redis; until it is set, all requests are refused
        self.num_bytes = 0  # sent
        self._host, self._run_uid = host, run_uid
        self._offers: OrderedDict[str, ShardRecord] = OrderedDict()
        self._num_uploads = 0

    def offer(self, record: ShardRecord) -> None:
        """Serve this blob, which is announced to other hosts."""
        digest = record.digest.hex()
        self._offers[digest] = record
        self._offers.move_to_end(digest)
        while len(self._offers) > _MAX_OFFERS:
            self._offers.popitem(last=False)

    def app(self) -> Starlette:
        routes = [Route("/pieces/{digest}", self._have), Route("/pieces/{digest}/{number}", self._piece)]
        return Starlette(routes=routes)

    async def _have(self, request: Request) -> Response:
        record = self._offered(request)
        return record if isinstance(record, Response) else Response(headers={HAVE: self._bitmap(record).hex()})

    async def _piece(self, request: Request) -> Response:
        record = self._offered(request)
        if isinstance(record, Response):
            return record
        if self._num_uploads >= MAX_UPLOADS:
            return Response(status_code=503)
        number = request.path_params["number"]
        piece = self._host.piece(record, int(number)) if _NUMBER.fullmatch(number) else None
        if piece is None:
            return Response(status_code=404, headers={HAVE: self._bitmap(record).hex()})
        return _Upload(self, piece, headers={HAVE: self._bitmap(record).hex(), "content-length": str(len(piece))})

    def _offered(self, request: Request) -> ShardRecord | Response:
        expected = token(self.secret, self._run_uid, self.address, request.url.path)
        given = request.headers.get("authorization", "").encode()  # compare_digest takes non-ASCII only as bytes
        if not self.secret or not hmac.compare_digest(given, f"Bearer {expected}".encode()):
            return Response(status_code=403)
        digest = request.path_params["digest"]
        record = self._offers.get(digest) if _DIGEST.fullmatch(digest) else None
        return record or Response(status_code=404)

    def _bitmap(self, record: ShardRecord) -> bytes:
        return bitmap_of(self._host.there(record), record.num_pieces)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1


class _Upload(StreamingResponse):
    """Occupies an upload slot until the last byte is with the kernel, or its time is up."""

    def __init__(self, door: Door, piece: bytes, *, headers: dict[str, str]) -> None:
        super().__init__(_cut(piece), headers=headers, media_type="application/octet-stream")
        self._door, self._num_bytes = door, len(piece)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._door.uploading():
            async with asyncio.timeout(_UPLOAD_S):
                await super().__call__(scope, receive, send)
        self._door.num_bytes += self._num_bytes


async def _cut(piece: bytes) -> AsyncIterator[memoryview]:
    for begin in range(0, len(piece), _SENT_BYTES):
        yield memoryview(piece)[begin : begin + _SENT_BYTES]


@contextmanager
def open_door(host: HostShare, bound: socket.socket, *, run_uid: str, address: str | None = None) -> Iterator[Door]:
    """Serve for the lifetime of the context. `address`: how others reach the socket, if not by its own address."""
    door = Door(host, run_uid=run_uid, address=address or address_of(bound))
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    listens: Future[None] = Future()

    async def serve() -> None:
        async with web.serving(door.app(), bound):
            listens.set_result(None)
            await stop.wait()

    def answer() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(serve())
        except ResourceError as error:  # it cannot listen
            listens.set_exception(error)

    thread = threading.Thread(target=answer, name="pieces for peers", daemon=True)
    thread.start()
    try:
        listens.result(_STARTS_WITHIN_S)
        yield door
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(_STARTS_WITHIN_S)
