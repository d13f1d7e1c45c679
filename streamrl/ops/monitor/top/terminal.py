"""A terminal for a full-screen program: reads keys one by one, and redraws a frame when it has changed.

Owns the terminal's mode while it is open, and restores it however it is left. `key` blocks up to its timeout.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.terminal import can_redraw

_MAX_READ_BYTES = 64  # read at once from a burst of keys
_DEFAULT_SIZE = 80, 24  # if the terminal reports no size: a serial line, or a container's
_KEYS: Mapping[str, Sequence[str]] = {  # by their byte sequences; escape is last of those that start with it
    "up": ("\x1b[A", "\x1bOA"),
    "down": ("\x1b[B", "\x1bOB"),
    "left": ("\x1b[D", "\x1bOD"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~",),
    "home": ("\x1b[H", "\x1b[1~"),
    "end": ("\x1b[F", "\x1b[4~"),
    "escape": ("\x1b",),
    "enter": ("\r", "\n"),
    "backspace": ("\x7f", "\x08"),
    "ctrl-c": ("\x03",),
}
_SEQUENCES = {sequence: name for name, sequences in _KEYS.items() for sequence in sequences}


class Terminal:
    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout
        if not (os.isatty(self._input) and self._output.isatty()):
            raise ConfigError("streamrl top needs a terminal; `streamrl status` prints one screen anywhere")
        self._console = Console(file=self._output, highlight=False)
        if not can_redraw(self._console):
            term = os.environ.get("TERM", "")
            raise ConfigError(
                f"streamrl top cannot draw on this terminal (TERM={term}); `streamrl status` prints one screen anywhere"
            )
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._shown: tuple[tuple[int, int], list[Text]] | None = None
        self._pending = ""

    @contextmanager
    def opened(self) -> Iterator[Self]:
        mode = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        attributes = termios.tcgetattr(self._input)
        attributes[3] &= ~termios.ISIG  # treat Ctrl-C as a key, so that quitting restores the terminal
        termios.tcsetattr(self._input, termios.TCSANOW, attributes)
        try:
            with self._live:
                yield self
        finally:
            termios.tcsetattr(self._input, termios.TCSADRAIN, mode)

    @property
    def size(self) -> tuple[int, int]:
        """(columns, lines)"""
        size = os.get_terminal_size(self._output.fileno())
        return size.columns or _DEFAULT_SIZE[0], size.lines or _DEFAULT_SIZE[1]

    @property
    def has_colour(self) -> bool:
        return not self._console.no_color

    def show(self, lines: list[Text]) -> None:
        """Show a frame; sends nothing if it has not changed."""
        frame = (self.size, lines)
        if frame != self._shown:
            self._shown = frame
            self._console.size = ConsoleDimensions(*self.size)  # even if COLUMNS and LINES are exported
            self._live.update(Group(*lines), refresh=True)

    def key(self, timeout_s: float) -> str | None:
        """Return the name of the next key, or None."""
        if not self._pending:
            ready, _, _ = select.select([self._input], [], [], max(0.0, timeout_s))
            if not ready:
                return None
            self._pending = os.read(self._input, _MAX_READ_BYTES).decode(errors="ignore")
        for sequence, name in _SEQUENCES.items():
            if self._pending.startswith(sequence):
                self._pending = self._pending[len(sequence) :]
                return name
        first, self._pending = self._pending[:1], self._pending[1:]
        return first or None
