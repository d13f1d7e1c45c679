"""A Redis that is killed, stopped, emptied, and put back to older copies of itself; with TLS and users where wanted.

A copy is the append-only file as it is at that moment, so a server that is put back knows what that one knew, and no
more. Blocks in starting until the server answers.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.process import dying_with_us
from streamrl.protocol.transport.embedded import find_server
from tests.helpers import wait_until

ADMIN = "admin"
_READY_S = 60.0
_NAME = "appendonly*"  # one file up to Redis 6.2, a folder since


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A certificate of its own for 127.0.0.1."""

    certificate: Path
    key: Path

    @staticmethod
    def make(folder: Path) -> Tls:
        made = Tls(certificate=folder / "server.crt", key=folder / "server.key")
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        words += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        words += ["-keyout", str(made.key), "-out", str(made.certificate)]
        subprocess.run(words, check=True, capture_output=True)
        return made


class MortalRedis:
    """Speaks on a unix socket, and with TLS on a port as well."""

    def __init__(self, folder: Path, *, tls: Tls | None = None, users: Sequence[str] = ()) -> None:
        """`users`: lines of a file of users; without any everybody may do everything."""
        self._folder, self._socket, self._tls = folder, folder / "redis.sock", tls
        self._num_copies = 0
        folder.mkdir(parents=True)
        self._port = _free_port() if tls else 0
        self._users = folder / "users.acl"
        self._users.write_text("\n".join([*users, f"user {ADMIN} on nopass ~* &* +@all"]) + "\n")
        self._has_users = bool(users)
        self.process = self._start()

    @property
    def url(self) -> str:
        """By which whoever looks from outside may do everything."""
        return f"unix://{f'{ADMIN}@' if self._has_users else ''}{self._socket}"

    def url_of(self, user: str) -> str:
        """With TLS, as a user with a password of its own."""
        assert self._tls is not None, "only a server with TLS has a port"
        return f"rediss://{user}@127.0.0.1:{self._port}?ssl_ca_certs={self._tls.certificate}"

    def client(self) -> redis.Redis:
        """Never repeats a call."""
        return redis.Redis(
            unix_socket_path=str(self._socket),
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

    def sizes(self) -> dict[Path, int]:
        """Of what is being appended to."""
        files = [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.incr.aof")]
        return {file: file.stat().st_size for file in files}

    def cut(self, sizes: dict[Path, int]) -> None:
        """What was written since then never reached the disk; it is dead."""
        for file, size in sizes.items():
            os.truncate(file, size)

    def copy(self) -> Path:
        """As it is now."""
        self._num_copies += 1
        to = self._folder / "copies" / str(self._num_copies)
        to.mkdir(parents=True)
        _copy_all(self._folder, to)
        return to

    def put_back(self, copy: Path) -> None:
        """It dies, and comes back as it was then."""
        self.kill()
        for path in self._folder.glob(_NAME):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _copy_all(copy, self._folder)
        self.start()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Nobody gets an answer, and no connection breaks."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _start(self) -> subprocess.Popen[bytes]:
        options = {
            "port": 0,
            "unixsocket": self._socket,
            "dir": self._folder,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-percentage": 0,  # a copy would miss a file that is being made
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        if self._has_users:
            options["aclfile"] = self._users
        if self._tls:
            options |= {"tls-port": self._port, "tls-auth-clients": "no", "bind": "127.0.0.1"}
            options |= {"tls-cert-file": self._tls.certificate, "tls-key-file": self._tls.key}
            options |= {"tls-ca-cert-file": self._tls.certificate}
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


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
