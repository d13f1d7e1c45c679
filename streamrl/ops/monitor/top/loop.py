"""The two threads of `top`: one looks at Redis, one draws and hears keys. Leaving ends both."""

from __future__ import annotations

from dataclasses import replace

import redis

from streamrl.ops.monitor.charts import sketches_of
from streamrl.ops.monitor.poller import Poller, Seen, Watcher
from streamrl.ops.monitor.rollouts import find_decoder_of_run, list_rollouts, open_rollout
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import Screen
from streamrl.ops.monitor.top.terminal import Terminal
from streamrl.ops.record.view import lines_of

_KEYS_EVERY_S = 0.1


def run(there: Opened, *, period_s: float) -> None:
    """Until the user leaves."""
    watcher = Watcher(there.client, there.keys, server=there.server)
    poller = Poller(watcher, period_s=period_s)
    screen, shown, curves = Screen(), Seen(), sketches_of(watcher.history)
    with Terminal().opened() as terminal, poller.looking():
        while not screen.has_quit:
            if not screen.is_frozen and (seen := poller.seen) is not shown:
                shown, curves = seen, sketches_of(watcher.history)
            (width, height), error = terminal.size, shown.error
            frame = draw(
                shown.view, screen, width=width, height=height, error=error, server=there.server, curves=curves
            )
            terminal.show(frame)
            if key := terminal.key(_KEYS_EVERY_S):
                screen = _serve(screen.press(key, shown.view), there, width=width, colour=terminal.has_colour)


def _serve(screen: Screen, there: Opened, *, width: int, colour: bool) -> Screen:
    """What a page wants from Redis."""
    try:
        if screen.wants_groups:
            return replace(screen, wants_groups=False, groups=list_rollouts(there.client, there.keys))
        if screen.wants_group:
            found = open_rollout(there.client, there.keys, screen.wants_group)
            words = find_decoder_of_run(there.client, there.keys)
            lines = lines_of(*found, words, width=width, colour=colour, max_lines=None) if found else ()
            return replace(screen, wants_group="", page="group", group=tuple(lines), scroll=0)
    except redis.RedisError:  # the frame says already that Redis is gone
        return replace(screen, wants_groups=False, wants_group="", groups=())
    return screen
