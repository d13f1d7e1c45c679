"""A program in a pseudo-terminal: its screen, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pyte

from tests.helpers import wait_until


class TerminalProgram:
    def __init__(self, descriptor: int, process: subprocess.Popen[bytes], *, width: int, height: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def lines(self) -> list[str]:
        """The lines on the screen now."""
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # the program has ended
                break
            if not data:
                break
            self.raw += data
            self._stream.feed(data)
        return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    def shows(self, *words: str, timeout_s: float = 60.0) -> str:
        """Return the screen once it shows all of the words."""
        try:
            wait_until(lambda: all(w in self.text() for w in words), description=f"{words}", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the screen:\n{self.text()}") from None
        return self.text()

    def hides(self, word: str) -> None:
        wait_until(lambda: word not in self.text(), description=f"{word!r} is gone")

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def resize(self, *, width: int, height: int) -> None:
        set_size(self._descriptor, width=width, height=height)
        self._screen.resize(height, width)
        os.kill(self.process.pid, signal.SIGWINCH)

    def forget_size(self) -> None:
        """Report no size, like a serial line or some containers' terminals."""
        set_size(self._descriptor, width=0, height=0)
        os.kill(self.process.pid, signal.SIGWINCH)


def set_size(descriptor: int, *, width: int, height: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


@contextmanager
def in_terminal(
    arguments: Sequence[str], *, width: int = 80, height: int = 24, **environment: str
) -> Iterator[TerminalProgram]:
    """Run `python -m cli.main ARGUMENTS`; killed at the end if it has not exited."""
    ours, its = pty.openpty()
    set_size(its, width=width, height=height)
    process = subprocess.Popen(
        [sys.executable, "-m", "streamrl.ops.cli.main", *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        start_new_session=True,
        # A shell's background job ignores SIGINT, and so would its children; in a person's terminal it is not ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(its)
    try:
        yield TerminalProgram(ours, process, width=width, height=height)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
