"""What a watcher remembers, read while it looks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.ops.monitor.web.server import ActivityTrace


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def worker(name: str, *, version: str = "1.1", alive: bool = True) -> Any:
    part = SimpleNamespace(name=name, state="working" if alive else "silent", doing="generate", alive=alive)
    return SimpleNamespace(part=part, version=version)


def view(at: int) -> Any:
    return SimpleNamespace(at=float(at), workers=[worker(f"worker/{at}", version=f"1.{at}")] * at)


@pytest.mark.usefixtures("quick_turns")
def test_what_is_read_while_it_looks_is_of_one_moment() -> None:
    views = [view(at) for at in range(1, 61)]
    lengths = set()
    for _ in range(50):
        trace = ActivityTrace()
        looking = threading.Thread(target=lambda trace=trace: [trace.add(one) for one in views], name="look")
        looking.start()
        while looking.is_alive():
            told = trace.to_json()
            lengths |= {len(told["idle"]["at"]) - len(counts) for counts in told["idle"]["series"].values()}
        looking.join()
        assert set(trace.to_json()["versions"]) == {f"worker/{at}" for at in range(1, 61)}
    assert lengths == {0}


def test_workers_that_are_gone_make_room_for_those_that_came_in_their_place() -> None:
    trace = ActivityTrace()
    came = [f"worker/{number:03}" for number in range(70)]
    for at, name in enumerate(came):
        gone = [worker(other, alive=False) for other in came[:at]]
        trace.add(SimpleNamespace(at=float(at), workers=[*gone, worker(name), worker("worker/stays")]))
    versions = trace.to_json()["versions"]
    assert list(versions)[:2] == [came[-1], "worker/stays"], "the page draws the first ones"
    assert list(versions)[2:] == came[-59:-1]
    assert versions["worker/stays"] == [(0.0, "1.1")]


def test_where_more_live_than_can_be_drawn_the_same_ones_are_drawn_on() -> None:
    trace = ActivityTrace()
    came = [f"worker/{number:03}" for number in range(100)]
    for at in range(3):
        trace.add(SimpleNamespace(at=float(at), workers=[worker(name, version=f"1.{at}") for name in came]))
        came = came[::-1]
    versions = trace.to_json()["versions"]
    assert list(versions) == sorted(came)[:60]
    assert {len(changes) for changes in versions.values()} == {3}
