"""The agent of a single machine: it meets nobody, and so nobody can reach it."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from streamrl.ops.launch.parts import Cluster, rendezvous
from tests.unit.test_agent_ending import REAL, agent, await_moment, ends_in_order

_LISTENS = "0A"  # a socket's state in /proc/net/tcp


@pytest.fixture(autouse=True)
def as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def listening(process: subprocess.Popen[str]) -> list[str]:
    """The addresses, in hexadecimal, at which the process or one that it has started listens for TCP."""
    ours = {path for pid in _family(process.pid) for path in _sockets(pid)}
    tables = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in tables if row[3] == _LISTENS and f"socket:[{row[9]}]" in ours]


def _family(pid: int) -> list[int]:
    children = [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
    return [pid, *(found for child in children for found in _family(child))]


def _sockets(pid: int) -> set[str]:
    return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_a_machine_alone_opens_no_port_and_ends_in_order(tmp_path: Path) -> None:
    """torch's TCP store would listen on all interfaces and unpickle what anybody writes there."""
    with agent(tmp_path, "step", which=REAL, options=rendezvous(None)) as process:
        await_moment(process, tmp_path, "step")
        assert listening(process) == []
        process.send_signal(signal.SIGTERM)
        ends_in_order(process, tmp_path)


def test_machines_that_meet_do_so_at_the_port_they_were_given(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with agent(
        tmp_path, "step", which=REAL, options=rendezvous(Cluster(nodes="1", endpoint=f"127.0.0.1:{port}"))
    ) as process:
        await_moment(process, tmp_path, "step")
        assert [int(place.rpartition(":")[2], 16) for place in listening(process)] == [port]
        process.send_signal(signal.SIGTERM)
        ends_in_order(process, tmp_path)
