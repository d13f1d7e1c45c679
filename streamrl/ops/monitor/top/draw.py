"""Draws the lines of one frame of `top`, exactly as many as the terminal has. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from streamrl.ops.monitor import text
from streamrl.ops.monitor.top.screen import HELP, Page, Screen
from streamrl.ops.monitor.view import View, WorkerStatus
from streamrl.terminal import age, number, printable, sparkline

Curves = Sequence[tuple[str, Sequence[float]]]  # by title

_MIN_BELOW = 3  # lines
_STYLES = {"healthy": "bold green", "degraded": "bold yellow", "stalled": "bold red", "ended": "bold red"}
_KEYS_LINE = "q quit  s sort  r reverse  / filter  f freeze  enter opens  g groups  w why  ?"


class Column(NamedTuple):
    title: str
    width: int
    value: Callable[[WorkerStatus], str]
    min_screen: int = 0  # columns of the terminal from which it is shown


COLUMNS = (  # in order of importance: a narrow terminal cuts off the last ones
    Column("worker", 0, lambda w: w.part.name.partition("/")[2] or w.part.name),
    Column("state", 20, lambda w: _state(w)),
    Column("lag", 4, lambda w: number(w.lag)),
    Column("tokens/s", 8, lambda w: number(w.tokens_per_s)),
    Column("progress", 8, lambda w: age(w.part.progress_s)),
    Column("version", 8, lambda w: w.version or "-"),
    Column("flight", 6, lambda w: number(w.in_flight)),
    Column("kv", 4, lambda w: f"{w.kv_use:.0%}" if w.kv_use is not None else "-"),
    Column("leases", 6, lambda w: str(w.leases), 100),
    Column("delivered", 9, lambda w: number(w.delivered), 110),
    Column("failed", 6, lambda w: number(w.failed), 110),
    Column("loads", 6, lambda w: number(w.loads), 130),
    Column("host", 16, lambda w: w.part.host, 140),
)
_MAX_NAME = 40
_TEXT_COLUMNS = ("worker", "host", "state")  # the others are numbers


def draw(
    view: View | None,
    screen: Screen,
    *,
    width: int,
    height: int,
    error: str = "",
    server: str = "",
    curves: Curves = (),
) -> list[Text]:
    lines = list(_head(view, screen, width=width, error=error, server=server))
    space = max(0, height - len(lines) - 1)
    body = [*_PAGES[screen.page](view, screen, width, space)] if view is not None else []
    if view is not None and screen.page == "workers" and space - len(body) >= _MIN_BELOW:
        body += _below(view, curves, width)
    lines += [*body[:space], *([Text()] * (space - len(body)))]
    return [_fit(line, width) for line in [*lines[: height - 1], _foot(screen)]]


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _foot(screen: Screen) -> Text:
    if screen.is_typing:
        return Text(f"filter: {printable(screen.filter)}_   enter: apply  esc: clear", style="reverse")
    return Text(_KEYS_LINE, style="reverse")


def _head(view: View | None, screen: Screen, *, width: int, error: str, server: str) -> Iterator[Text]:
    if error:
        yield Text(f"REDIS IS GONE: {printable(error)}", style="bold red")
        if view is not None:
            yield Text("below is the last state seen; it is updated when Redis answers again", style="red")
    if view is None:
        if not error:
            yield Text(f"waiting for Redis at {printable(server)} ...", style="yellow")
        return
    frozen = Text("FROZEN  ", style="bold cyan") if screen.is_frozen else Text()
    first, *others = draw_rows(view, width=width)
    yield from (frozen + first, *others)


def draw_rows(view: View, *, width: int) -> Iterator[Text]:
    """The lines of `status`, in colour; run and health need no label."""
    for label, line in text.rows(view, width=width):
        if label in ("run", "health"):
            yield Text(line, style="bold" if label == "run" else _STYLES[view.verdict])
        else:
            style = "bold red" if line.startswith("GONE") else "yellow" if label == "dead" else ""
            yield Text.assemble((f"{label:<{text.LABEL}}", "dim"), (line, style))


# Pages


def _workers(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    workers = screen.rows(view)
    sorted_by = f"by {screen.sort}{', reversed' if screen.backwards else ''}"
    matching = f", {len(workers)} of {len(view.workers)} match '{screen.filter}'" if screen.filter else ""
    room = max(0, space - 2)
    selected = min(screen.selected, max(0, len(workers) - 1))
    first = max(0, min(selected - room // 2, len(workers) - room))
    title, *rows = draw_workers(workers[first : first + room], width=width)
    if rows:
        rows[selected - first].stylize("reverse")
    return [title, Text(printable(f"{sorted_by}{matching}"), style="dim"), *rows]


def _below(view: View, curves: Curves, width: int) -> Iterator[Text]:
    """Below the workers, if there is room: causes and curves. What does not fit is not shown."""
    yield Text()
    for cause in view.causes:
        yield from (Text(line) for line in text.cause_lines(cause, width=width))
    if not curves:
        return
    left = min(width // 2, max(len(title) for title, _ in curves))
    yield Text("curves, first step to last", style="underline")
    for title, values in curves:
        ends = f"{number(values[0])} → {number(values[-1])}"
        curve = sparkline(values, max(1, width - left - len(ends) - 3))
        yield Text.assemble((f"{printable(title)[:left]:<{left}} ", "dim"), f"{curve}  {ends}")


def draw_workers(workers: Sequence[WorkerStatus], *, width: int) -> list[Text]:
    """A title line, and one line for each worker."""
    columns = [column for column in COLUMNS if width >= column.min_screen]
    widths = [column.width for column in columns]
    widths[0] = max(10, min(_MAX_NAME, width - sum(widths) - len(widths)))
    title = " ".join(_cell(c, c.title, w) for c, w in zip(columns, widths, strict=True))
    lines = [Text(title, style="underline")]
    for worker in workers:
        cells = (_cell(c, c.value(worker), w) for c, w in zip(columns, widths, strict=True))
        lines.append(Text(printable(" ".join(cells)), style=_style_of(worker)))
    return lines


def _cell(column: Column, value: str, width: int) -> str:
    value = value if len(value) <= width else f"{value[: width - 1]}~"
    return f"{value:<{width}}" if column.title in _TEXT_COLUMNS else f"{value:>{width}}"


def _state(worker: WorkerStatus) -> str:
    part = worker.part
    if part.state == "silent":
        return f"SILENT {age(part.report_s)}"
    if worker.rejected:
        return f"REJECTS {worker.rejected_version}"
    return f"waits: {part.doing}" if part.state == "waiting" else part.doing


def _style_of(worker: WorkerStatus) -> str:
    if worker.rejected:
        return "bold red"
    return {"silent": "bold red", "waiting": "yellow", "starting": "cyan"}.get(worker.part.state, "")


def _worker(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    found = next((worker for worker in view.workers if worker.part.name == screen.worker), None)
    if found is None:
        return [Text(f"{printable(screen.worker)} no longer reports (esc: back)", style="yellow")]
    part = found.part
    facts: Mapping[str, object] = {
        "worker": part.name,
        "process": f"{part.pid} on {part.host}",
        "state": text.activity(part),
        "progress": f"{age(part.progress_s)} ago; reported {age(part.report_s)} ago",
        "weights": f"{found.version or '-'}, {number(found.lag)} steps behind {view.weights.latest or '-'}",
        "leases": found.leases,
        **found.detail,
    }
    lines = [Text.assemble((f"{name:<24}", "dim"), printable(str(value))) for name, value in facts.items()]
    return _scrolled(lines, screen, space)


def _groups(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    if not screen.groups:
        return [Text("the stream holds no groups: a checkpoint has committed them all (g: reload)", style="dim")]
    title = f"{'ticket':>8} {'worker':<20} {'mean':>7}  {'rewards':<16} {'tokens':<14} versions"
    lines = [Text(title, style="underline")]
    room = max(1, space - 1)
    first = max(0, min(screen.selected - room // 2, len(screen.groups) - room))
    for place, group in enumerate(screen.groups[first : first + room], start=first):
        mean = number(sum(group.rewards) / len(group.rewards)) if group.rewards else "failed"
        rewards = " ".join(number(reward) for reward in group.rewards) or group.error
        tokens = " ".join(str(length) for length in group.lengths)
        left = f"{group.ticket:>8} {group.worker[:20]:<20} {mean:>7}"
        line = f"{left}  {rewards[:16]:<16} {tokens[:14]:<14} {group.versions}"
        lines.append(Text(printable(line), style="reverse" if place == screen.selected else ""))
    return lines


def _group(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    if not screen.group:
        return [Text("this group has been committed in the meantime (esc: back)", style="yellow")]
    return _scrolled(list(screen.group), screen, space)


def _causes(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    return _scrolled([Text(line) for line in text.why_lines(view, width=width)], screen, space)


def _help(view: View, screen: Screen, width: int, space: int) -> list[Text]:
    return [Text(line) for line in HELP]


def _scrolled(lines: list[Text], screen: Screen, space: int) -> list[Text]:
    first = max(0, min(screen.scroll, len(lines) - space))
    return lines[first:]


_PAGES: Mapping[Page, Callable[[View, Screen, int, int], Sequence[Text]]] = {
    "workers": _workers,
    "worker": _worker,
    "groups": _groups,
    "group": _group,
    "causes": _causes,
    "help": _help,
}
