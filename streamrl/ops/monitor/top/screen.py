"""The state of `top`'s screen, and what the keys do to it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.text import Text

from streamrl.ops.monitor.rollouts import RolloutLine
from streamrl.ops.monitor.view import View, WorkerStatus

Page = Literal["workers", "worker", "groups", "group", "causes", "help"]
_STATES = ("working", "waiting", "starting", "stopping", "silent")

SORTS: Mapping[str, Callable[[WorkerStatus], tuple[float | str, ...]]] = {
    "name": lambda w: (w.part.name,),
    "state": lambda w: (-_STATES.index(w.part.state) if w.part.state in _STATES else 0, w.part.doing),
    "lag": lambda w: (-(w.lag or 0),),
    "tokens/s": lambda w: (-(w.tokens_per_s or 0.0),),
    "in flight": lambda w: (-(w.in_flight or 0),),
    "progress": lambda w: (-w.part.progress_s,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    page: Page = "workers"
    sort: str = "name"
    backwards: bool = False
    filter: str = ""
    is_typing: bool = False  # a filter
    is_frozen: bool = False
    selected: int = 0  # row of the page's list
    scroll: int = 0  # first line of a page of text
    worker: str = ""  # the open worker's name
    group: Sequence[Text] = ()  # the lines of the open group; empty: it is gone
    groups: Sequence[RolloutLine] = ()
    wants_group: str = ""  # entry id of a group to open; the loop reads it from Redis
    wants_groups: bool = False
    has_quit: bool = False

    def rows(self, view: View) -> list[WorkerStatus]:
        """The workers, sorted and filtered."""
        words = self.filter.lower().split()
        found = [w for w in view.workers if all(word in _haystack(w) for word in words)]
        return sorted(found, key=lambda w: (SORTS[self.sort](w), w.part.name), reverse=self.backwards)

    def press(self, key: str, view: View | None) -> Screen:
        if self.is_typing:
            return self._type(key)
        action = _KEYS.get(key)
        return action(self, view) if action else self

    def _type(self, key: str) -> Screen:
        if key in ("enter", "escape"):
            return replace(self, is_typing=False, filter=self.filter if key == "enter" else "")
        if key == "backspace":
            return replace(self, filter=self.filter[:-1])
        return replace(self, filter=self.filter + key, selected=0) if len(key) == 1 and key.isprintable() else self

    def turned(self, page: Page) -> Screen:
        """Switch to this page, or back from it."""
        is_new = self.page != page
        page = page if is_new else "workers"
        return replace(self, page=page, scroll=0, selected=0, wants_groups=is_new and page == "groups")

    def moved(self, by: int, view: View | None) -> Screen:
        if self.page == "workers":
            count = len(self.rows(view)) if view else 0
        elif self.page == "groups":
            count = len(self.groups)
        else:
            return replace(self, scroll=max(0, self.scroll + by))
        return replace(self, selected=max(0, min(count - 1, self.selected + by)))

    def opened(self, view: View | None) -> Screen:
        if self.page == "workers" and view is not None and (rows := self.rows(view)):
            chosen = rows[min(self.selected, len(rows) - 1)].part.name
            return replace(self, page="worker", worker=chosen, scroll=0)
        if self.page == "groups" and self.groups:
            return replace(self, wants_group=self.groups[min(self.selected, len(self.groups) - 1)].id)
        return self

    def back(self) -> Screen:
        if self.page == "workers" and self.filter:
            return replace(self, filter="", selected=0)
        before: Page = "groups" if self.page == "group" else "workers"
        return replace(self, page=before, scroll=0, selected=0 if self.page == "groups" else self.selected)


def _haystack(worker: WorkerStatus) -> str:
    part = worker.part
    return f"{part.name} {part.host} {part.state} {part.doing} {worker.version or ''}".lower()


def _next_sort(screen: Screen, view: View | None) -> Screen:
    names = list(SORTS)
    return replace(screen, sort=names[(names.index(screen.sort) + 1) % len(names)], selected=0)


_ACTIONS: Mapping[tuple[str, ...], Callable[[Screen, View | None], Screen]] = {
    ("q", "ctrl-c"): lambda screen, view: replace(screen, has_quit=True),
    ("s",): _next_sort,
    ("r",): lambda screen, view: replace(screen, backwards=not screen.backwards),
    ("/",): lambda screen, view: replace(screen, page="workers", is_typing=True),
    ("f", " "): lambda screen, view: replace(screen, is_frozen=not screen.is_frozen),
    ("g",): lambda screen, view: screen.turned("groups"),
    ("w",): lambda screen, view: screen.turned("causes"),
    ("?", "h"): lambda screen, view: screen.turned("help"),
    ("up", "k"): lambda screen, view: screen.moved(-1, view),
    ("down", "j"): lambda screen, view: screen.moved(1, view),
    ("page up",): lambda screen, view: screen.moved(-10, view),
    ("page down",): lambda screen, view: screen.moved(10, view),
    ("home",): lambda screen, view: screen.moved(-1_000_000, view),
    ("end",): lambda screen, view: screen.moved(1_000_000, view),
    ("enter",): lambda screen, view: screen.opened(view),
    ("escape", "left", "backspace"): lambda screen, view: screen.back(),
}
_KEYS = {key: action for keys, action in _ACTIONS.items() for key in keys}

HELP = (
    "up down j k       select a worker or a group     page up/down, home, end: jump",
    "enter             open it                        esc: back",
    "s                 sort by the next column        r: reverse the order",
    "/                 filter by name, host, state    enter: apply, esc: clear",
    "f, space          freeze, or resume",
    "g                 the latest groups delivered",
    "w                 why: what holds the run back, with the remedy",
    "q                 quit; the run is not affected",
)
