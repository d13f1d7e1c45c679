"""Hosts on one machine: network namespaces with a link, an address and names each, joined by a switch. Needs root.

    worker-0   worker-1   learner-0 ...     each a namespace: its own eth0 and lo, its own /etc/hosts and host name
        │          │          │
    ────┴──────────┴──────────┴─────        the switch: one more, with a bridge and the other ends of the links

All names are this run's own, so two runs do not meet, and all of it is removed at the end. What is started on a host
dies with who started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.helpers import wait_until

_NETNS = Path("/etc/netns")  # what lies in NAME/ takes the place of the file of that name in /etc
_NETWORK = "10.77.0"
_TOOLS = ("ip", "bridge", "unshare", "setpriv")
_DISABLED, _FORWARDING = "0", "3"  # states of a port of a bridge
# With a name of its own, and killed when the test is.
_LIVE = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']


def why_not() -> str | None:
    """What is missing for hosts; None when nothing is. Leaves nothing behind."""
    if os.geteuid() != 0:
        return "it needs root: sudo make test-root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (iproute2 and util-linux have them)"
    space = f"probe-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        _run("ip", "netns", "add", space)
        _run("ip", "netns", "del", space)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode(errors='replace').strip()}"
    return None


class Hosts:
    def __init__(self, names: Sequence[str], logs: Path, *, services: Mapping[str, str]) -> None:
        """`services`: names that lead to a host, whichever it is."""
        self._logs = logs
        self._tag = f"{os.getpid()}-{secrets.token_hex(2)}"
        self._addresses = {name: f"{_NETWORK}.{place}" for place, name in enumerate(names, 2)}
        self._services = dict(services)
        self._started: list[subprocess.Popen[bytes]] = []

    def build(self) -> None:
        _sweep()
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for name, address in self._addresses.items():
            space = self.space(name)
            _run("ip", "netns", "add", space)
            ends = ["eth0", "type", "veth", "peer", "name", self._port(name), "netns", self._switch]
            _run("ip", "-n", space, "link", "add", *ends)
            _run("ip", "-n", self._switch, "link", "set", self._port(name), "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", link, "up")
            (_NETNS / space).mkdir(parents=True)
        self._write_names()

    def start(self, host: str, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inside = ["ip", "netns", "exec", self.space(host), *_LIVE, host, *words]
        with (self._logs / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *inside],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def ask(self, host: str, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """A short command on that host, to its end."""
        inside = ["ip", "netns", "exec", self.space(host), *words]
        return subprocess.run(inside, env=dict(environment), capture_output=True, text=True, timeout=90, check=False)

    def log(self, host: str) -> str:
        path = self._logs / f"{host}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def point(self, service: str, host: str) -> None:
        """The service's name leads there from now on; who is connected to another stays so."""
        self._services[service] = host
        self._write_names()

    @contextlib.contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """Nothing moves on its link, and nobody is told: no carrier is lost, no connection refused."""
        self._set_port(host, _DISABLED)
        try:
            yield
        finally:
            self._set_port(host, _FORWARDING)

    def kill(self, host: str) -> None:
        """All that runs there, by kill -9; the host stays, and closes what they had open."""
        for pid in self._processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._processes(host), description=f"nothing runs on {host}")

    def lose(self, host: str) -> None:
        """As if its power went: it says no last word."""
        self._set_port(host, _DISABLED)
        self.kill(host)

    def destroy(self) -> None:
        """All of it, also where a part of it does not go, or was never made."""
        with contextlib.ExitStack() as stack:
            for process in self._started:
                stack.callback(process.wait, 10)
            stack.callback(_remove, self._switch)
            for name in self._addresses:
                stack.callback(shutil.rmtree, _NETNS / self.space(name), ignore_errors=True)
                stack.callback(_remove, self.space(name))
                stack.callback(self.kill, name)

    def space(self, host: str) -> str:
        """Its network namespace, in /run/netns."""
        return f"{host}-{self._tag}"

    def address(self, host: str) -> str:
        return self._addresses[host]

    @property
    def _switch(self) -> str:
        return f"switch-{self._tag}"

    def _port(self, host: str) -> str:
        return f"p{list(self._addresses).index(host)}"

    def _set_port(self, host: str, state: str) -> None:
        _run("bridge", "-n", self._switch, "link", "set", "dev", self._port(host), "state", state)

    def _write_names(self) -> None:
        """As a cluster's names are: a host knows itself by its short name, others by that of their service."""
        others = "".join(f"{address} {name}.{_service_of(name)}\n" for name, address in self._addresses.items())
        others += "".join(f"{self._addresses[host]} {service}\n" for service, host in self._services.items())
        for name, address in self._addresses.items():
            own = f"127.0.0.1 localhost\n{address} {name}.{_service_of(name)} {name}\n"
            (_NETNS / self.space(name) / "hosts").write_text(own + others)

    def _processes(self, host: str) -> list[int]:
        with contextlib.suppress(subprocess.CalledProcessError):  # there is no such host
            return [int(pid) for pid in _run("ip", "netns", "pids", self.space(host)).split()]
        return []


def _sweep() -> None:
    """What a test left behind that was killed itself: its processes went with it, its namespaces did not."""
    for name in _run("ip", "netns", "list").decode().splitlines():
        space = name.split()[0]
        tag = re.fullmatch(r".+-(\d+)-[0-9a-f]{4}", space)
        if tag and not Path(f"/proc/{tag[1]}").exists():
            _remove(space)
            shutil.rmtree(_NETNS / space, ignore_errors=True)


def _service_of(host: str) -> str:
    return host.partition("-")[0]


def _remove(space: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _run("ip", "netns", "del", space)


def _run(*words: str) -> bytes:
    return subprocess.run(words, check=True, capture_output=True, timeout=30).stdout


@contextlib.contextmanager
def hosts(names: Sequence[str], logs: Path, *, services: Mapping[str, str]) -> Iterator[Hosts]:
    logs.mkdir()
    made = Hosts(names, logs, services=services)
    try:
        made.build()
        yield made
    finally:
        made.destroy()
