"""Displays a run to the user who started it: one live panel on a terminal that can redraw it, otherwise a line now and
then.

It shows the monitor's `View`; the launcher's own messages (what it waits for while Redis is empty) are passed in.
Drawing happens in the thread that calls `show`, and writes only to the terminal; if that is closed, nothing ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import IO, Any, Protocol, Self, TypeGuard, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.ops.monitor import text as view_text
from streamrl.ops.monitor.top.draw import draw_rows, draw_workers
from streamrl.ops.monitor.view import View
from streamrl.terminal import age, can_redraw, number, printable

_MAX_WIDTH, _MAX_HEIGHT = 100, 24
_BORDER = 4  # columns and lines: border and blank on either side, and lines for the phase and for hidden workers
_PLAIN_EVERY_S, _PLAIN_SOONEST_S = 30.0, 5.0  # without a terminal: between lines, and before one about a change
_PLAIN_METRICS = {"reward": "train_rollouts/rewards", "lag": "lag/mean"}  # of the last step, without a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is shown of a run at one moment."""

    title: str
    phase: str  # what the launcher does, if there is no more to show
    began: float  # unix time
    view: View | None  # None: Redis is not up yet
    footer: str


class Audience(Protocol):
    """Where the launcher reports to: a terminal, or the program that requested the run. Entered once the launcher has
    locked the folder."""

    def show(self, frame: Frame) -> None:
        """Show the current state; called several times a second while the parts run."""

    def notify(self, text: str) -> None:
        """Show a message that must not be missed."""

    def checking(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context; its function is called repeatedly with what is being tried before the run."""

    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class _LastingFile:
    """What a console writes to, from the first failure on nothing: the window of a run may be closed, and the program
    that its output is piped to may end, also before the run has saved."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._is_terminal, self._is_lost = file, file.isatty(), False
        self.encoding = getattr(file, "encoding", "utf-8")

    def write(self, text: str) -> int:
        self._attempt(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._file.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            action()
        except OSError:
            self._is_lost = True
            with suppress(OSError):  # a file in memory has no descriptor
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._file.fileno())  # what is left in its buffer is written at exit
                os.close(devnull)


class Display:
    """Reports to a terminal, or to a log, and goes on without: the console may lose its output."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        console.file = cast("IO[str]", _LastingFile(console.file))
        self._console, self._clock = console, clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) else None
        self._last_phase = ""
        self._last_line, self._last_trouble = clock(), ""

    def show(self, frame: Frame) -> None:
        if self._live is not None:
            width, height = min(_MAX_WIDTH, self._console.width), min(_MAX_HEIGHT, self._console.height)
            self._live.update(render(frame, now=time.time(), width=width, height=height), refresh=True)
            return
        if frame.phase != self._last_phase:
            self._last_phase = frame.phase
            self.notify(frame.phase)
        now, trouble = self._clock(), _trouble(frame.view)
        pause_s = _PLAIN_EVERY_S if trouble == self._last_trouble else _PLAIN_SOONEST_S
        if now >= self._last_line + pause_s:
            self._last_line, self._last_trouble = now, trouble
            self.notify(plain_line(frame, now=time.time()))

    def notify(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def checking(self) -> AbstractContextManager[Callable[[str], None]]:
        """Show what is being tried before the run, where `show` draws later."""
        return spinner(self._console)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


@contextmanager
def spinner(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the latest text; where nothing can be redrawn it prints a line now and then, and
    repeats rarely."""
    if can_redraw(console):
        with console.status("") as status:
            yield lambda text: status.update(Text(printable(text)))
        return
    printed_at, last_text = -_PLAIN_EVERY_S, ""

    def show(text: str) -> None:
        nonlocal printed_at, last_text
        if clock() >= printed_at + (_PLAIN_EVERY_S if text == last_text else _PLAIN_SOONEST_S):
            printed_at, last_text = clock(), text
            console.print(Text(printable(text)), soft_wrap=True)

    yield show


def plain_line(frame: Frame, *, now: float) -> str:
    """Return a short line for a log, with what is wrong."""
    view, elapsed = frame.view, _clock_time(now - frame.began)
    if not _run_exists(view):
        return f"{elapsed}  {frame.phase or 'the learner is starting'}"
    fields = [elapsed, view_text.steps(view)]
    if view.run.eta_s is not None:
        fields.append(f"left {age(view.run.eta_s)}")
    metrics = view.learner.metrics
    fields += [f"{name} {number(metrics[key])}" for name, key in _PLAIN_METRICS.items() if key in metrics]
    return printable("  ".join(field for field in (*fields, view_text.workers_line(view), _trouble(view)) if field))


def _trouble(view: View | None) -> str:
    """Return what is wrong, if anything; a change is worth a line."""
    if not _run_exists(view):
        return ""
    troubles = [cause.title for cause in view.causes if cause.level != "info"]
    return f"{view.verdict}: {troubles[0]}" if troubles else ""


def _run_exists(view: View | None) -> TypeGuard[View]:
    return view is not None and view.run.state != "absent"


def render(frame: Frame, *, now: float, width: int, height: int) -> RenderableType:
    view = frame.view
    lines: list[RenderableType] = []
    if _run_exists(view):
        inner_width = width - _BORDER
        _, *rows = draw_rows(view, width=inner_width)  # the first, about the run, is replaced by title and progress bar
        room = max(1, height - _BORDER - len(rows) - 2)
        workers = draw_workers(view.workers[:room], width=inner_width)
        lines += [_progress(view, elapsed_s=now - frame.began), *rows, *workers]
        if (more := len(view.workers) - room) > 0:
            lines.append(Text(f"and {more} more", style="dim"))
        for line in (*rows, *workers):
            line.truncate(inner_width, overflow="ellipsis")
    lines += [Text(f"{frame.phase} …", style="yellow")] if frame.phase else []
    return Panel(
        Group(*lines),
        title=Text.assemble(("streamrl", "bold"), f" · {printable(frame.title)}"),
        title_align="left",
        subtitle=Text(printable(frame.footer), style="dim"),
        subtitle_align="right",
        border_style="cyan",
        width=width,
        padding=(0, 1),
    )


def _progress(view: View, *, elapsed_s: float) -> RenderableType:
    run = view.run
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    clock = _clock_time(elapsed_s) + (f"  left {age(run.eta_s)}" if run.eta_s is not None else "")
    bar = ProgressBar(total=1.0, completed=run.share_done) if run.share_done is not None else Text()
    grid.add_row(Text(view_text.steps(view), style="bold"), bar, clock)
    return grid


def _clock_time(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
