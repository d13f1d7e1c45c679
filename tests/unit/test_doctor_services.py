"""`streamrl doctor` asks services where and as workers do, and survives whatever answers there."""

from __future__ import annotations

import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.finding import Finding
from streamrl.ops.monitor.doctor.services import check_rewards, check_teacher

LOOPBACK = ("127.0.0.1", 0)
# A path without GET is answered with 405 by most servers, and with 501 by Python's own.
STATUS = {"/health": 200, "/v1/models": 200, "/keyed/models": 401, "/score": 405, "/own": 501}
STATUS |= {"/moved": 301, "/moved/health": 301}


class Service(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(STATUS.get(self.path, 404))
        self.send_header("location", "/health")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class NotHttp(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"-ERR wrong number of arguments for 'get' command\r\n")


@contextmanager
def listening(server: socketserver.TCPServer) -> Iterator[str]:
    """Serve in a thread; yields host:port."""
    with server:
        thread = threading.Thread(target=server.serve_forever, name="service")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def here() -> Iterator[str]:
    with listening(ThreadingHTTPServer(LOOPBACK, Service)) as address:
        yield f"http://{address}"


@pytest.fixture
def not_http() -> Iterator[str]:
    with listening(socketserver.TCPServer(LOOPBACK, NotHttp)) as address:
        yield f"http://{address}"


Ask = Callable[[str], Finding]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: .}\ndata: {train: train.jsonl}\n")

    def ask(source: str) -> Finding:
        (finding,) = check_rewards(load_config(str(file), [f"rewards.mine={source}"]))
        return finding

    return ask


def reward(url: str) -> str:
    return f"{{type: http, url: '{url}'}}"


def judge(url: str) -> str:
    return f"{{type: judge, rubric: right or wrong, judges: {{one: {{url: '{url}', model: m}}}}}}"


def test_a_port_where_nobody_speaks_http_is_an_error(ask: Ask, not_http: str) -> None:
    finding = ask(reward(not_http))
    assert (finding.level, "-ERR wrong number of arguments" in finding.evidence) == ("error", True)


def test_what_is_no_address_is_an_error(ask: Ask) -> None:
    assert {ask(source("http://[::1")).level for source in (reward, judge)} == {"error"}


def test_a_proxy_of_the_environment_is_not_used(
    ask: Ask, here: str, not_http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", not_http)
    assert ask(reward(here)).level == "ok"


@pytest.mark.parametrize(("variable", "named"), [("https_proxy", True), ("no_proxy", False)])
def test_who_has_a_proxy_is_told_that_workers_use_none(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, variable: str, named: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, "proxy:3128")
    finding = ask(reward("http://127.0.0.1:9"))
    assert finding.level == "error"
    assert ("https_proxy is set, but workers use no proxy" in finding.remedy) is named


def test_a_teacher_is_asked_at_the_root_of_its_server(tmp_path: Path, here: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: .}\ndata: {train: train.jsonl}\n")
    for path in ("", "/v1"):
        (finding,) = check_teacher(load_config(str(file), [f"teacher.urls=['{here}{path}']"]))
        assert finding.level == "ok", finding


def test_a_redirect_is_not_followed(ask: Ask, here: str) -> None:
    finding = ask(reward(f"{here}/moved"))
    assert (finding.level, finding.evidence) == ("warning", f"{here}/moved answers with status 301")
    assert "/health" in finding.remedy


def test_an_authority_that_only_this_shell_trusts_is_trusted_as_workers_do(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "cert.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", *kind, *names, "-keyout", key, "-out", public]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(public))
    server = ThreadingHTTPServer(LOOPBACK, Service)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with listening(server) as address:
        finding = ask(reward(f"https://{address}"))
    assert finding.level == "ok", finding


@pytest.mark.parametrize(
    ("source", "path", "level"),
    [
        (reward, "", "ok"),
        (reward, "/", "ok"),
        (reward, "/score", "ok"),
        (reward, "/own", "ok"),
        (reward, "/elsewhere", "warning"),
        (judge, "", "ok"),
        (judge, "/v1", "ok"),
        (judge, "/keyed/", "ok"),
        (judge, "/elsewhere", "warning"),
    ],
)
def test_a_service_is_asked_at_the_address_that_workers_use(
    ask: Ask, here: str, source: Callable[[str], str], path: str, level: str
) -> None:
    assert ask(source(here + path)).level == level
