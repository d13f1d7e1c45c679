"""T38: passwords, certificate and tokens are changed while all is running, by the words of docs/operations.md."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.protocol.transport.acl import ROLES
from streamrl.protocol.transport.address import PASSWORD
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.operator import set_control
from tests.dashboards import showing
from tests.faults.harness import FaultWorld
from tests.faults.judged.server import ADMIN, MortalRedis
from tests.faults.judged.tls import TlsRoad
from tests.faults.place import Place
from tests.faults.report import report
from tests.faults.stand_in_worker import Delivery, Habits
from tests.helpers import wait_until
from tests.pages import ROOT, blocks

SETTINGS = schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0)
WORKER = Habits(repeats=False)  # which is the operator's, and another role
STREAMRL = [sys.executable, "-m", "streamrl.ops.cli.main"]
PATIENCE_S = 240.0
# What is on an administrator's PATH: `redis-cli` as the user that may do everything.
CLI = """
import redis, sys
with redis.Redis(unix_socket_path={socket!r}, username={user!r}, protocol=2) as client:
    print(client.execute_command(*sys.argv[1:]))
"""


class Site:
    """Redis behind TLS with users of all roles, a learner and two workers, as who changes secrets finds it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.passwords, self.authority = folder / "redis" / "PASSWORDS", folder / "authority.crt"
        self.server = self._start_server()
        self.road = stack.enter_context(TlsRoad(self.server.socket, folder / "tls"))
        self.authority.write_bytes(self.road.certificate.read_bytes())
        place = Place(
            folder=folder, name="run", url=self.server.url, max_epochs=100_000, passwords=self.passwords, deadline_s=300
        )
        self.world = stack.enter_context(FaultWorld(place))
        self.learner = self.world.start_learner(url=self.url("learner"))
        self.workers = [
            self.world.start_worker(name=name, url=self.url("worker"), habits=WORKER) for name in ("w1", "w2")
        ]

    def _start_server(self) -> MortalRedis:
        first = self.folder / "first"
        first.mkdir()
        for role in ROLES:
            (first / role).write_text(f"first-of-{role}\n")
        told = subprocess.run([*STREAMRL, "redis", "acl", "--passwords", str(first)], capture_output=True, text=True)
        server = MortalRedis(self.folder / "redis", users=told.stdout.splitlines())
        self._stack.callback(server.kill)
        first.rename(self.passwords)
        (self.folder / "redis" / "own.acl").write_text(f"user {ADMIN} on nopass ~* &* +@all\n")
        return server

    def url(self, role: str) -> str:
        return self.road.url_of(role, authority=self.authority)

    def run(self, words: str) -> None:
        """In a shell beside Redis, as the page has it."""
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        cli = self.folder / "cli.py"
        cli.write_text(CLI.format(socket=str(self.server.socket), user=ADMIN))
        for name, command in {"streamrl": STREAMRL, "redis-cli": [sys.executable, str(cli)]}.items():
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (tools / name).chmod(0o755)
        path = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", words],
            cwd=self.folder / "redis",
            env=path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr

    def cut_off(self) -> None:
        """Everybody connects anew."""
        with self.server.client() as admin:
            for role in ROLES:
                admin.execute_command("CLIENT", "KILL", "USER", role)

    def goes_on(self) -> None:
        """A checkpoint and a delivery of each worker, from now on."""
        before = [self.step(), *self.delivered()]

        def has_moved() -> bool:
            assert [part.exit_code for part in (self.learner, *self.workers)] == [None] * 3, self.world.last_words()
            return all(now > then for now, then in zip([self.step(), *self.delivered()], before, strict=True))

        wait_until(has_moved, description="learner and workers go on", timeout_s=PATIENCE_S)

    def step(self) -> int:
        return self.world.newest_checkpoint().step

    def delivered(self) -> list[int]:
        return [len(Delivery.all_in(worker.output)) for worker in self.workers]

    def is_known(self, role: str, password: str) -> bool:
        try:
            with connect(self.server.url.replace(f"{ADMIN}@", f"{role}:{password}@"), SETTINGS):
                return True
        except ResourceError:
            return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


@contextmanager
def dashboard(site: Site, token: Path) -> Iterator[str]:
    """Its address; a process of its own, as the monitor's role."""
    words = [*STREAMRL, "dashboard", "--redis", site.url("monitor"), "--run", "run", "--port", "0"]
    told = {**os.environ, f"{PASSWORD}_FILE": str(site.passwords / "monitor"), "PYTHONPATH": str(ROOT)}
    with showing([*words, "--token-file", str(token)], environment=told) as url:
        yield url


def asked(url: str, token: str) -> tuple[int, str]:
    """(status, what was said)"""
    headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}api/view", headers=headers), timeout=240) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_every_secret_is_changed_by_the_page_while_all_goes_on(
    site: Site, record_property: Callable[[str, object], None]
) -> None:
    token = site.folder / "token"
    token.write_text("first-token")
    (page,) = [each for each in blocks(ROOT / "docs" / "operations.md", "sh") if "test_secrets_changed" in each.note]
    site.goes_on()

    with dashboard(site, token) as url:
        wait_until(lambda: asked(url, "first-token")[0] == 200, description="the page answers", timeout_s=PATIENCE_S)
        site.run(page.text)
        site.goes_on()
        assert not any(site.is_known(role, f"first-of-{role}") for role in ROLES)
        assert all(site.is_known(role, (site.passwords / role).read_text().strip()) for role in ROLES)
        wait_until(lambda: '"error": ""' in asked(url, "first-token")[1], description="the page sees Redis again")
        token.write_text("another-token")
        assert asked(url, "another-token")[0] == 401, "before it has started again"

    old = site.authority.read_bytes()
    (site.folder / "next").mkdir()
    new = site.road.present(site.folder / "next").read_bytes()
    site.authority.write_bytes(old + new)
    site.cut_off()
    site.goes_on()
    site.authority.write_bytes(new)
    site.cut_off()
    site.goes_on()
    with dashboard(site, token) as url:
        assert asked(url, "another-token")[0] == 200
        assert asked(url, "first-token")[0] == 401

    with site.server.client() as admin:
        set_control(admin, site.world.keys, "drain", by="test")
        site.learner.ends_with(0)
    audit = site.world.audit()
    report("T38", audit, injections=6)
    record_property("figure", f"{audit.step} steps, lost {audit.lost}, twice {audit.twice}")
    assert (audit.lost, audit.twice) == (0, 0)
