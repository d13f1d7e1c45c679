"""The two threads of `top`: one looks at Redis, one draws and hears keys. Leaving ends both."""

from __future__ import annotations

from dataclasses import replace

import redis

from streamrl.monitor.looker import Looker, Seen
from streamrl.monitor.opening import Opened
from streamrl.monitor.rollouts import find_decoder, list_rollouts, open_rollout
from streamrl.monitor.top.draw import draw
from streamrl.monitor.top.screen import Screen
from streamrl.monitor.top.terminal import Terminal
from streamrl.monitor.watcher import Watcher

_KEYS_EVERY_S = 0.1


def run(there: Opened, *, period_s: float) -> None:
    """Until the user leaves."""
    looker = Looker(Watcher(there.client, there.keys, server=there.server), period_s=period_s)
    screen, shown = Screen(), Seen()
    with Terminal() as terminal, looker.looking():
        while not screen.has_quit:
            if not screen.is_frozen:
                shown = looker.seen
            width, height = terminal.size
            terminal.show(draw(shown.view, screen, width=width, height=height, error=shown.error, server=there.server))
            if key := terminal.key(_KEYS_EVERY_S):
                screen = _serve(screen.press(key, shown.view), there)


def _serve(screen: Screen, there: Opened) -> Screen:
    """What a page wants from Redis."""
    try:
        if screen.wants_groups:
            return replace(screen, wants_groups=False, groups=list_rollouts(there.client, there.keys))
        if screen.wants_group:
            config = there.client.hget(there.keys.meta, "config")
            decode = find_decoder(config.decode() if isinstance(config, bytes) else "")
            group = open_rollout(there.client, there.keys, screen.wants_group, decode)
            return replace(screen, wants_group="", page="group", group=group, scroll=0)
    except redis.RedisError:  # the frame says already that Redis is gone
        return replace(screen, wants_groups=False, wants_group="", groups=())
    return screen
