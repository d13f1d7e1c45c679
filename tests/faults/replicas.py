"""Servers that replicate each other, and sentinels that watch them; each is killed with its context, or before."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from streamrl.process import dying_with_us, free_port
from streamrl.protocol.transport.embedded import find_server
from tests.helpers import wait_until

_SERVICE = "run"
_WATCH = """port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor run 127.0.0.1 {master} 2
sentinel down-after-milliseconds run 1000
sentinel failover-timeout run 5000
sentinel parallel-syncs run 2
"""


class Server:
    """A server that can be replicated over TCP; the run uses its unix socket."""

    def __init__(self, folder: Path, *, replica_of: Server | None) -> None:
        folder.mkdir()
        self.socket, self.port = folder / "redis.sock", free_port("127.0.0.1")
        options = {"port": self.port, "bind": "127.0.0.1", "unixsocket": self.socket, "dir": folder, "save": ""}
        options |= {"repl-diskless-sync-delay": 0}  # otherwise replicas wait 5 s for others to join
        options |= {"replicaof": f"127.0.0.1 {replica_of.port}"} if replica_of else {}
        words = [word for name, value in options.items() for word in (f"--{name}", *_words(name, str(value)))]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                dying_with_us([str(find_server()), *words], by=signal.SIGKILL), stdout=log, stderr=log
            )
        self.admin = redis.Redis(unix_socket_path=str(self.socket), protocol=2)
        wait_until(self._is_ready, description=f"a server in {folder}")

    @property
    def num_written(self) -> int:
        """Bytes of commands that changed something."""
        return int(self.admin.info("replication")["master_repl_offset"])

    def cut_off(self) -> None:
        """Keep what was written until about now, and receive nothing more."""
        self.admin.replicaof("NO", "ONE")

    def _is_ready(self) -> bool:
        try:
            state = self.admin.info("replication")
        except redis.RedisError:
            return False
        return state["role"] == "master" or state["master_link_status"] == "up"


@contextmanager
def server(folder: Path, *, replica_of: Server | None = None) -> Iterator[Server]:
    made = Server(folder, replica_of=replica_of)
    try:
        yield made
    finally:
        made.admin.close()
        made.process.kill()
        made.process.wait()


class Sentinels:
    """Three sentinels with a quorum of two; their state is in their files."""

    def __init__(self, folder: Path, *, master: Server) -> None:
        self._ports = [free_port("127.0.0.1") for _ in range(3)]
        self._processes = [self._start(folder / f"sentinel-{port}", port, master) for port in self._ports]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self._ports)}/{_SERVICE}"

    def all_know(self, replicas: int) -> bool:
        """Return whether all know so many usable replicas, and each other."""
        return all(self._knows(port, replicas) for port in self._ports)

    def master_port(self) -> int:
        """Return the master's port according to the majority."""
        told = sorted(self._master(port) for port in self._ports)
        return told[1]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, folder: Path, port: int, master: Server) -> subprocess.Popen[bytes]:
        folder.mkdir()
        (file := folder / "sentinel.conf").write_text(_WATCH.format(port=port, folder=folder, master=master.port))
        words = [str(find_server()), str(file), "--sentinel"]
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(dying_with_us(words, by=signal.SIGKILL), stdout=log, stderr=log)

    def _knows(self, port: int, replicas: int) -> bool:
        try:
            with redis.Redis(port=port, protocol=2, socket_timeout=5.0) as client:
                fit = [one for one in client.sentinel_slaves(_SERVICE) if one["flags"] == "slave"]
                return len(fit) >= replicas and len(client.sentinel_sentinels(_SERVICE)) == len(self._ports) - 1
        except redis.RedisError:
            return False

    def _master(self, port: int) -> int:
        with redis.Redis(port=port, protocol=2, socket_timeout=5.0) as client:
            return int(client.sentinel_get_master_addr_by_name(_SERVICE)[1])


@contextmanager
def sentinels(folder: Path, *, master: Server) -> Iterator[Sentinels]:
    made = Sentinels(folder, master=master)
    try:
        yield made
    finally:
        made.end()


def _words(option: str, value: str) -> list[str]:
    return value.split() if option == "replicaof" else [value]
