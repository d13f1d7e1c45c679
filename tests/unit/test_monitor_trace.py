"""What a watcher remembers, read while it looks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.ops.monitor.web.server import Trace


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def view(at: int) -> Any:
    part = SimpleNamespace(name=f"worker/{at}", state="working", doing="generate")
    return SimpleNamespace(at=float(at), workers=[SimpleNamespace(part=part, version=f"1.{at}")] * at)


@pytest.mark.usefixtures("quick_turns")
def test_what_is_read_while_it_looks_is_of_one_moment() -> None:
    views = [view(at) for at in range(1, 61)]
    lengths = set()
    for _ in range(50):
        trace = Trace()
        looking = threading.Thread(target=lambda trace=trace: [trace.add(one) for one in views], name="look")
        looking.start()
        while looking.is_alive():
            told = trace.to_json()
            lengths |= {len(told["idle"]["at"]) - len(counts) for counts in told["idle"]["series"].values()}
        looking.join()
        assert list(trace.to_json()["versions"]) == sorted(f"worker/{at}" for at in range(1, 61))
    assert lengths == {0}
