"""The servers of this house under requests that nobody means well: an answer that is none of 500, or the end of the
connection; never an exception, a wait without end, or memory without a bound."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from streamrl.ops.monitor.exporter import make_server
from streamrl.ops.monitor.runs import Target, opened
from streamrl.ops.monitor.web.guard import Guard
from streamrl.ops.monitor.web.server import Dashboard
from streamrl.process import bind
from streamrl.telemetry.progress import Progress
from streamrl.web import Connection, Server
from streamrl.workers.health import Health
from streamrl.workers.http import make_app
from streamrl.workers.reward_server.batcher import Batcher, ScoringModelDouble
from streamrl.workers.reward_server.server import RewardApp
from streamrl.workers.sharing.door import Door
from tests.run_folders import make_folder

_WAIT_S = 60.0
_FLOOD_BYTES = 32 << 20


def reward_server() -> Starlette:
    model = ScoringModelDouble()
    return RewardApp(model, Batcher(model, max_delay_s=0.0, max_batch_tokens=1000), token=None).asgi()


def worker() -> Starlette:
    return make_app(Health(Progress(part="worker/0", role="worker")))


def door() -> Starlette:
    """To the weights, which nobody finds who has no key."""
    made = Door(cast("Any", None), run_uid="run", address="127.0.0.1:1")
    made.secret = b"secret"
    return made.app()


@contextmanager
def dashboard(folder: Path) -> Iterator[Starlette]:
    run = make_folder(folder, "ended", "finished")
    with opened(Target(url=None, run="ended", folder=run)) as there:
        yield Dashboard(there, Guard(listens_on="127.0.0.1"), period_s=3600.0).app()


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Mapping[str, Starlette]]:
    with dashboard(tmp_path) as page:
        yield {"dashboard": page, "reward server": reward_server(), "worker": worker(), "door": door()}


PLACES = [
    "/",
    "/api/view",
    "/api/history",
    "/api/rollouts",
    "/api/rollouts/",
    "/metrics",
    "/livez",
    "/readyz",
    "/score",
]
PIECES = ["/pieces/0", f"/pieces/{'0' * 32}", f"/pieces/0/{'9' * 5000}"]
PATHS = st.sampled_from([*PLACES, *PIECES])
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "", "\x00"])
WORDS = st.sampled_from(
    [b"host", b"origin", b"sec-fetch-site", b"authorization", b"content-length", b"content-type", b"accept-encoding"]
)
KNOWN = st.sampled_from([b"127.0.0.1", b"localhost:1", b"[::1]", b"application/json", b"gzip;q=nan", b"-1", b"9" * 30])
HEADERS = st.lists(st.tuples(WORDS, KNOWN | st.binary(max_size=40)), max_size=5)
VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E))  # what the parser lets into an address
QUERIES = st.sampled_from(["from=1&to=5", "from=9" + "9" * 5000, "from=-1&to=", "from=%ff&to=1e3"]) | VISIBLE
BODIES = st.sampled_from([b'{"texts": ["a"]}', b'{"tokens": [[1]]}', b'{"query": "a"}']) | st.binary(max_size=200)


@st.composite
def scopes(draw: st.DrawFn) -> dict[str, Any]:
    path = draw(PATHS) + draw(st.just("") | st.text(max_size=20))
    given = [(b"host", b"127.0.0.1:8420"), *draw(HEADERS)]
    return {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8420),
        "client": ("127.0.0.1", 1),
        "method": draw(METHODS),
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": draw(QUERIES).encode(),
        "headers": given[draw(st.integers(0, 1)) :],
    }


async def answer(app: Starlette, scope: dict[str, Any], body: bytes) -> int:
    """Its status. What the application raises comes out."""
    coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    coming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    statuses: list[int] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async with asyncio.timeout(_WAIT_S):
        await app({**scope, "headers": list(scope["headers"])}, coming.get, send)
    [status] = statuses
    return status


@pytest.mark.parametrize("name", ["dashboard", "reward server", "worker", "door"])
def test_any_request_has_an_answer_that_is_no_error_of_ours(apps: Mapping[str, Starlette], name: str) -> None:
    app = apps[name]
    with asyncio.Runner() as runner:
        living = app.router.lifespan_context(app)
        runner.run(living.__aenter__())
        try:

            @given(scope=scopes(), body=BODIES)
            @settings(max_examples=200, deadline=None)
            def check(scope: dict[str, Any], body: bytes) -> None:
                status = runner.run(answer(app, scope, body))
                assert 200 <= status < 500 or status == 503, scope

            check()
        finally:
            runner.run(living.__aexit__(None, None, None))


@contextmanager
def served(app: Starlette, *, connection: type[Connection] = Connection) -> Iterator[int]:
    """The port, in a thread."""
    ready = threading.Event()
    with bind("127.0.0.1", 0, what="the test") as bound:
        server = Server(app, on_ready=ready.set, connection=connection, timeout_graceful_shutdown=1)
        server.capture_signals = ExitStack  # type: ignore[method-assign, assignment]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), name="server")
        thread.start()
        try:
            assert ready.wait(_WAIT_S)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(_WAIT_S)


@contextmanager
def exported() -> Iterator[int]:
    bound = bind("127.0.0.1", 0, what="the test")
    with make_server(CollectorRegistry(), bound, silence_s=2.0) as server:
        thread = threading.Thread(target=server.serve_forever, name="exporter")
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            server.shutdown()
            thread.join(_WAIT_S)


SERVERS: Mapping[str, Callable[[Path], Any]] = {
    "reward server": lambda folder: served(reward_server()),
    "worker": lambda folder: served(worker()),
    "exporter": lambda folder: exported(),
}
FLOODS = {
    "a header without end": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * (1 << 16)),
    "headers without end": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-More: and more\r\n" * 4096),
    "a path without end": (b"GET /", b"a" * (1 << 16)),
    "a method without end": (b"G", b"G" * (1 << 16)),
    "bytes of no protocol": (b"\x16\x03\x01\x02\x00\x01", b"\xff" * (1 << 16)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_what_has_no_end_is_refused_before_it_fills_memory_and_others_are_served(name: str, tmp_path: Path) -> None:
    with SERVERS[name](tmp_path) as port:
        for flood, (begin, more) in FLOODS.items():
            num_sent = poured(port, begin, more)
            assert num_sent < _FLOOD_BYTES, f"{flood}: all of it was read"
        assert replied(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1."
        )


class Impatient(Connection):
    head_timeout_s = 0.5


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HT"])
def test_a_connection_that_never_says_what_it_wants_is_ended(said: bytes) -> None:
    with served(worker(), connection=Impatient) as port:
        assert replied(port, said).count(b"HTTP/1.1") == said.count(b"\r\n\r\n")


def test_a_caller_that_asks_again_and_again_is_not_taken_for_one() -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(worker(), connection=Impatient) as port, socket.create_connection(("127.0.0.1", port), 60) as client:
        answers = client.makefile("rb")
        end, num_answers = time.monotonic() + 3 * Impatient.head_timeout_s, 0
        while time.monotonic() < end:
            client.sendall(request)
            head = b"".join(iter(answers.readline, b"\r\n"))
            answers.read(int(head.lower().partition(b"content-length:")[2].split()[0]))
            num_answers += head.startswith(b"HTTP/1.1 200")
    assert num_answers > 2


def poured(port: int, begin: bytes, more: bytes) -> int:
    """Bytes that were taken until the server would have no more of it."""
    num_sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as client:
        try:
            client.sendall(begin)
            while num_sent < _FLOOD_BYTES:
                client.sendall(more)
                num_sent += len(more)
        except (ConnectionResetError, BrokenPipeError):
            pass
    return num_sent


def replied(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as client:
        client.sendall(request)
        return client.makefile("rb").read()
