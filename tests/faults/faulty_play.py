"""Misbehaving games and agents of every kind, for a worker's child process; the prompt's row selects one. What they
did, and what should have been impossible, is written line by line to the file `log`.

    raise, exit, hang    in mid-episode
    garbage              answers of every wrong form, and on the worker's own pipe
    giant                a gigabyte
    late                 answers, or makes requests, long after its rollout ended
    thief                an agent that tries the sessions of others, and its own key on them
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

KINDS = ("good", "raise", "hang", "exit", "garbage", "giant", "late", "thief")
OPENED = "opened"  # a session was accessible that should have been closed to the caller
HALF = "half a \ud800 character"
_GIANT = 1 << 30
_FOR_EVER_S = 3600.0
_TURNS = 3


class Game:
    def __init__(self, *, log: str, kinds: str = ",".join(KINDS), late_s: float = 1.0) -> None:
        self._log, self._kinds, self._late_s = log, kinds, late_s
        self._turn = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        self._kind, self._number = kind_of(row, self._kinds)
        note(self._log, f"lives {os.getpid()}")

    def step(self, completion: str) -> Any:
        self._turn += 1
        if self._turn < _TURNS:
            return "go on", 0.0, False
        note(self._log, self._kind)
        if self._kind == "garbage":
            return _GARBAGE_OF_GAMES[self._number % len(_GARBAGE_OF_GAMES)]()
        if self._kind == "giant":
            return "x" * _GIANT, 1.0, False
        if self._kind == "hang":
            time.sleep(_FOR_EVER_S)
        if self._kind == "late":
            time.sleep(self._late_s)
        go_wrong(self._kind)
        return None, 1.0, True


async def agent(session: Any, row: Mapping[str, Any], *, log: str, kinds: str = ",".join(KINDS), late_s: float) -> Any:
    kind, number = kind_of(row, kinds)
    note(log, f"lives {os.getpid()}")
    for turn in range(_TURNS):
        await asyncio.to_thread(ask, session.base_url, session.api_key, f"turn {turn}")
    note(log, kind)
    if kind == "garbage":
        return _GARBAGE_OF_AGENTS[number % len(_GARBAGE_OF_AGENTS)]()
    if kind == "giant":
        return await _send_a_gigabyte(session)
    if kind == "hang":
        await asyncio.sleep(_FOR_EVER_S)
    if kind == "late":
        try:
            await asyncio.sleep(_FOR_EVER_S)
        finally:
            _try(log, session.base_url, session.api_key)
    if kind == "thief":
        await asyncio.to_thread(_steal, log, session)
    go_wrong(kind)
    return 1.0


def kind_of(row: Mapping[str, Any], kinds: str) -> tuple[str, int]:
    """Return the kind, and which one of its kind this is."""
    known = kinds.split(",")
    number, kind = divmod(row["answer"], len(known))
    return known[kind], number


def note(log: str, line: str) -> None:
    with open(log, "a") as file:
        file.write(f"{line}\n")


def go_wrong(kind: str) -> None:
    if kind == "raise":
        raise KeyError("what")
    if kind == "exit":
        os._exit(3)


def ask(base_url: str, key: str, content: str) -> Any:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", body, headers), timeout=60
    ) as answer:
        return json.loads(answer.read())


def write_on_the_pipe() -> Any:
    """Write forged answers to the answer pipe, if it can be found, in place of all that are pending."""
    forged = "".join(f'{{"id": {number}, "value": 7}}\n' for number in range(1000))
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                os.write(int(name), f'{forged}{{"id": []}}\ngarbage\n'.encode())
        except OSError:
            continue
    return None


def _raise(error: Exception) -> Any:
    raise error


_GARBAGE_OF_GAMES: tuple[Callable[[], Any], ...] = (
    write_on_the_pipe,
    lambda: (HALF, 1.0, False),
    lambda: ("", 1.0, False),
    lambda: (7, 1.0, True),
    lambda: ("", float("nan"), True),
    lambda: ("", 10**400, True),
    lambda: ("", "good", True),
    lambda: 7,
    lambda: _raise(ValueError(HALF)),
)
_GARBAGE_OF_AGENTS: tuple[Callable[[], Any], ...] = (
    write_on_the_pipe,
    lambda: HALF,
    lambda: None,
    lambda: float("inf"),
    lambda: {"one": 1e308, "other": 1e308},
    lambda: {HALF: 1.0},
    lambda: {"a" * 10_000: 1.0},
    lambda: {f"name{n}": 1.0 for n in range(100)},
    lambda: _raise(ValueError(HALF)),
)

_seen: list[tuple[str, str]] = []  # sessions of this process: base URLs and keys


def _steal(log: str, session: Any) -> None:
    for base_url, key in _seen[-4:]:
        _try(log, base_url, session.api_key)
        _try(log, session.base_url, key)
    _seen.append((session.base_url, session.api_key))


def _try(log: str, base_url: str, key: str) -> None:
    try:
        ask(base_url, key, "is it open?")
    except urllib.error.HTTPError as error:
        note(log, f"refused {error.code}")
    except OSError:  # the worker has exited
        note(log, "refused")
    else:
        note(log, OPENED)


async def _send_a_gigabyte(session: Any) -> float:
    try:
        await asyncio.to_thread(ask, session.base_url, session.api_key, "x" * _GIANT)
    except (OSError, MemoryError):
        return 1.0
    raise AssertionError("a gigabyte was taken")
