"""The two threads of `top`: one looks at Redis, one draws and hears keys. Leaving ends both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import redis

from streamrl.errors import TransportError
from streamrl.monitor.opening import Opened
from streamrl.monitor.rollouts import find_decoder, list_rollouts, open_rollout
from streamrl.monitor.top.draw import draw
from streamrl.monitor.top.screen import Screen
from streamrl.monitor.top.terminal import Terminal
from streamrl.monitor.view import View
from streamrl.monitor.watcher import Watcher

_KEYS_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    view: View | None = None
    error: str = ""  # Redis does not answer now


class Looker:
    """Looks every `period_s`; `seen` is always the last outcome."""

    def __init__(self, watcher: Watcher, *, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seen = Seen()
        self._watcher, self._period_s, self._clock = watcher, period_s, clock
        self._gone_since: float | None = None
        self._stop = threading.Event()

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="looks at Redis", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def look(self) -> None:
        try:
            self.seen = Seen(view=self._watcher.look())
            self._gone_since = None
        except TransportError as error:
            now = self._clock()
            self._gone_since = self._gone_since or now
            self.seen = Seen(view=self.seen.view, error=f"for {now - self._gone_since:.0f} s; {error}")

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self.look()
            # Never more than half of the time, however large the run.
            took = self._clock() - began
            self._stop.wait(max(took, self._period_s - took))


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
