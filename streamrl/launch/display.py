"""How a run looks to who started it: one live panel on a terminal, a line now and then elsewhere.

Everything shown comes from Redis by way of `Watch`; the few words of the launcher's own (what it waits for before there
is anything in Redis) are passed in. Drawing is done by whoever calls `show`, in no thread of its own, and never writes
anything but to the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.launch.watch import Watch
from streamrl.telemetry.progress import Report
from streamrl.terminal import printable, sparkline
from streamrl.transport.snapshot import Snapshot
from streamrl.versions import show

MAX_WIDTH = 100
MAX_PARTS = 8  # rows; with those of a large run the panel would not fit
MAX_SOURCES = 3
_STALE_S, _OLD_S = 10.0, 60.0  # age of the last progress: from here on yellow, red
_PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    title: str
    phase: str  # what the launcher does, while that is all there is to say
    began: float  # unix time
    watch: Watch | None  # None: Redis is not there yet
    footer: str


class Display(Protocol):
    def show(self, view: View) -> None: ...
    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class LiveDisplay:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, view: View) -> None:
        self._live.update(render(view, now=time.time(), width=min(MAX_WIDTH, self._console.width)), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()


class PlainDisplay:
    """For logs and pipes: what is new, and a line every few seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last_phase = ""
        self._next_line = clock() + _PLAIN_EVERY_S

    def show(self, view: View) -> None:
        if view.phase != self._last_phase:
            self._last_phase = view.phase
            self.say(view.phase)
        if self._clock() >= self._next_line:
            self._next_line = self._clock() + _PLAIN_EVERY_S
            self.say(plain_line(view, now=time.time()))

    def say(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@contextmanager
def spinner(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows what it is told last; where there is no terminal, a line now and then."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(Text(printable(text)))
        return
    next_line = 0.0

    def say(text: str) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _PLAIN_EVERY_S
            console.print(Text(printable(text)), soft_wrap=True)

    yield say


def duration(seconds: float) -> str:
    """1:05, or 2:03:07."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_line(view: View, *, now: float) -> str:
    words = [duration(now - view.began)]
    if view.watch is None or view.watch.now is None:
        return f"{words[0]}  {view.phase}"
    words += [_steps(view.watch), *(f"{name} {value}" for name, value in facts(view.watch))]
    words += [f"{report.part}: {_activity(report)}" for report in _at_work(view.watch.now)[:MAX_PARTS]]
    return printable("  ".join(words))


def render(view: View, *, now: float, width: int) -> RenderableType:
    rows: list[RenderableType] = []
    watch = view.watch
    if watch is None or watch.now is None:
        rows.append(Text(f"{view.phase} …", style="yellow"))
    else:
        rows += [_progress(watch, began=view.began, now=now), Text(), _parts(watch.now, now=now), Text()]
        rows += _curves(watch, width=width)
        rows.append(_facts_grid(watch))
        rows += [Text(f"{view.phase} …", style="yellow")] if view.phase else []
    return Panel(
        Group(*rows),
        title=Text.assemble(("streamrl", "bold"), f" · {printable(view.title)}"),
        title_align="left",
        subtitle=Text(printable(view.footer), style="dim"),
        subtitle_align="right",
        border_style="cyan",
        width=width,
        padding=(0, 1),
    )


def _progress(watch: Watch, *, began: float, now: float) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left_s = watch.seconds_left()
    clock = duration(now - began) + (f"  left {duration(left_s)}" if left_s is not None else "")
    total = watch.max_steps
    bar: RenderableType = ProgressBar(total=total, completed=min(watch.step, total)) if total else Text()
    grid.add_row(Text(_steps(watch), style="bold"), bar, clock)
    return grid


def _steps(watch: Watch) -> str:
    return f"step {watch.step}" + (f"/{watch.max_steps}" if watch.max_steps else "")


def _parts(snapshot: Snapshot, *, now: float) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=True, header_style="dim")
    table.add_column("part", no_wrap=True)
    table.add_column("does", no_wrap=True, ratio=1)
    for name in ("progress", "version", "behind", "in flight", "tokens/s"):
        table.add_column(name, no_wrap=True, justify="right")
    reports = _at_work(snapshot)
    for report in reports[:MAX_PARTS]:
        table.add_row(*_part(report, snapshot, now=now))
    if (more := len(reports) - MAX_PARTS) > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    return table


def _at_work(snapshot: Snapshot) -> list[Report]:
    """Who looks at the run is in the picture only by what it counts."""
    return [report for report in snapshot.reports if report.role != "launcher"]


def _part(report: Report, snapshot: Snapshot, *, now: float) -> Iterator[Text]:
    age_s = max(0.0, now - report.last_progress)
    yield Text(printable(report.part))
    yield Text(_activity(report), style="yellow" if report.state == "waiting" else "green")
    yield Text(f"{age_s:.1f} s", style="red" if age_s > _OLD_S else "yellow" if age_s > _STALE_S else "")
    yield Text(_version(report))
    step = report.detail.get("step")
    behind = isinstance(step, int) and report.role == "worker" and snapshot.latest_version is not None
    yield Text(str(snapshot.latest_version_step - int(step or 0)) if behind else "")
    for name in ("in_flight", "tokens_per_s"):
        value = report.detail.get(name)
        yield Text(f"{value:,}".replace(",", " ") if isinstance(value, int) else "")


def _activity(report: Report) -> str:
    return printable(f"waits for {report.doing}" if report.state == "waiting" else report.doing)


def _version(report: Report) -> str:
    version = report.detail.get("version", "")
    return show(version) if isinstance(version, int) else printable(str(version))


def _curves(watch: Watch, *, width: int) -> Iterator[RenderableType]:
    rewards = watch.curve("train_rollouts/rewards")
    if rewards:
        marks = sparkline(rewards, max(10, width - 36))
        yield Text.assemble(
            ("reward    ", "dim"), (marks, "cyan"), f"  {rewards[0]:.2f} → ", (f"{rewards[-1]:.2f}", "bold")
        )
    held_out = watch.held_out()[:MAX_SOURCES]
    if held_out:
        line = Text.assemble(("held out  ", "dim"))
        for name, values in held_out:
            line.append_text(
                Text.assemble(f"{printable(name)} {values[0]:.2f} → ", (f"{values[-1]:.2f}", "bold"), "   ")
            )
        yield line


def facts(watch: Watch) -> Iterator[tuple[str, str]]:
    """Name and value of what is worth knowing at any time."""
    if (reward := watch.latest("train_rollouts/rewards")) is not None:
        yield "reward", f"{reward:.2f}"
    if (lag := watch.latest("lag/mean")) is not None:
        yield "lag", f"{lag:.1f} (max {watch.latest('lag/max') or 0:.0f}) steps"
    trained, dropped = watch.latest("stream/groups_trained"), watch.latest("stream/groups_dropped")
    if trained is not None and dropped is not None:
        yield "groups", f"{trained:.0f} trained, {dropped:.0f} dropped"
    assert watch.now is not None, "looked at before it is shown"
    train = watch.now.streams["train"]
    yield "tickets", f"{train.num_tickets} out ({train.num_leased} leased), {train.num_groups} groups in the stream"
    if watch.now.latest_version is not None:
        loads = watch.loads
        yield (
            "weights",
            f"{show(watch.now.latest_version)}, {loads.loaded} loads, {loads.in_flight} with samples in flight",
        )
    restarts = sum(int(r.detail.get("restarts", 0)) for r in watch.now.reports if r.role == "launcher")
    if restarts:
        yield "restarts", f"{restarts} of parts that died"
    if watch.now.num_dead:
        yield "dead", f"{watch.now.num_dead} tickets"


def _facts_grid(watch: Watch) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True)
    for name, value in facts(watch):
        if name != "reward":  # the curve has it
            grid.add_row(name, value)
    return grid
