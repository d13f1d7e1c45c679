"""The two threads of `top`: one looks at Redis, one draws and reads keys. Quitting ends both."""

from __future__ import annotations

from dataclasses import replace

from streamrl.ops.monitor.charts import sketches_of
from streamrl.ops.monitor.poller import LatestView, Poller, watch
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.rollouts import Rollouts, rollouts_of
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import Screen
from streamrl.ops.monitor.top.terminal import Terminal

_KEYS_EVERY_S = 0.1


def run(source: Opened | Remains, *, period_s: float) -> None:
    """Run until the user quits."""
    watcher, rollouts = watch(source), rollouts_of(source)
    poller = Poller(watcher, period_s=period_s)
    screen, shown, curves = Screen(), LatestView(), sketches_of(watcher.history)
    with Terminal().opened() as terminal, poller.looking():
        while not screen.has_quit:
            if not screen.is_frozen and (seen := poller.seen) is not shown:
                shown, curves = seen, sketches_of(watcher.history)
            (width, height), error = terminal.size, shown.error
            frame = draw(
                shown.view, screen, width=width, height=height, error=error, server=source.where, curves=curves
            )
            terminal.show(frame)
            if key := terminal.key(_KEYS_EVERY_S):
                screen = _serve(screen.press(key, shown.view), rollouts, width=width, colour=terminal.has_colour)


def _serve(screen: Screen, rollouts: Rollouts, *, width: int, colour: bool) -> Screen:
    """Read what the page needs."""
    if screen.wants_groups:
        return replace(screen, wants_groups=False, groups=rollouts.latest())
    if screen.wants_group:
        lines = rollouts.lines(screen.wants_group, width=width, colour=colour)
        return replace(screen, wants_group="", page="group", group=lines, scroll=0)
    return screen
