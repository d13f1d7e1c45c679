"""A Redis that is killed, stopped, emptied, and rolled back to older copies of itself; optionally with users.

A copy is the append-only file at that moment, so a server that is rolled back knows exactly what it knew then. Blocks
at start until the server answers.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.process import dying_with_us
from streamrl.protocol.transport.embedded import find_server
from tests.helpers import wait_until

ADMIN = "admin"
_READY_S = 60.0
_HELD_MS = 10_000
_NAME = "appendonly*"  # one file up to Redis 6.2, a folder since


class MortalRedis:
    """Listens on a unix socket only."""

    def __init__(self, folder: Path, *, users: Sequence[str] = ()) -> None:
        """`users`: lines of an ACL file; without any, everybody may do everything."""
        self._folder, self.socket = folder, folder / "redis.sock"
        self._num_copies = 0
        folder.mkdir(parents=True)
        self._users = folder / "users.acl"
        self._users.write_text("\n".join([*users, f"user {ADMIN} on nopass ~* &* +@all"]) + "\n")
        self._has_users = bool(users)
        self.process = self._start()

    @property
    def url(self) -> str:
        """The URL of a user who may do everything."""
        return f"unix://{f'{ADMIN}@' if self._has_users else ''}{self.socket}"

    def client(self) -> redis.Redis:
        """Return a client that never retries."""
        return redis.Redis(
            unix_socket_path=str(self.socket),
            username=ADMIN if self._has_users else None,
            protocol=2,
            socket_timeout=10.0,
            retry=Retry(NoBackoff(), 0),
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        self.process = self._start()

    def revive(self) -> None:
        """Recover from an interrupted fault."""
        if self.process.poll() is not None:
            self.start()
        self.process.send_signal(signal.SIGCONT)

    def sizes(self) -> dict[Path, int]:
        """Return the sizes of the files being appended to."""
        self._wait_until_written()
        files = [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.incr.aof")]
        return {file: file.stat().st_size for file in files}

    def cut(self, sizes: dict[Path, int]) -> None:
        """Cut off what was written since, as if it had never reached the disk; the server must be dead."""
        for file, size in sizes.items():
            os.truncate(file, size)

    def copy(self) -> Path:
        """Return a copy of its current state."""
        self._wait_until_written()
        self._num_copies += 1
        to = self._folder / "copies" / str(self._num_copies)
        to.mkdir(parents=True)
        _copy_all(self._folder, to)
        return to

    def hold(self) -> None:
        """Block all changes from here on, so that an observer can see everything before the fault."""
        with self.client() as client:
            client.client_pause(_HELD_MS, all=False)

    def put_back(self, copy: Path) -> None:
        """Kill it, and start it with that copy."""
        self.kill()
        for path in self._folder.glob(_NAME):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _copy_all(copy, self._folder)
        self.start()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Stop it: nobody gets an answer, and no connection breaks."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _start(self) -> subprocess.Popen[bytes]:
        options: dict[str, object] = {
            "port": 0,
            "unixsocket": self.socket,
            "dir": self._folder,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-percentage": 0,  # a copy would miss a file being rewritten
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        if self._has_users:
            options["aclfile"] = self._users
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with (self._folder / "redis.log").open("ab") as log:
            process = subprocess.Popen(
                dying_with_us([str(find_server()), *words], by=signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self._answers(process), description="the server answers", timeout_s=_READY_S)
        return process

    def _wait_until_written(self) -> None:
        """Wait for the disk: if it is slow, acknowledged writes stay in memory for up to two seconds."""

        def is_written() -> bool:
            with self.client() as client:
                return int(client.info("persistence")["aof_buffer_length"]) == 0

        if self.process.poll() is None:
            wait_until(is_written, description="the server has written down what it answered")

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        log = self._folder / "redis.log"
        assert process.poll() is None, f"the server ended at once: {log.read_text(errors='replace')[-1000:]}"
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


def _copy_all(folder: Path, to: Path) -> None:
    for path in folder.glob(_NAME):
        if path.is_dir():
            shutil.copytree(path, to / path.name)
        else:
            shutil.copy2(path, to / path.name)
