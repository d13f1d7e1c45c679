"""A rank is told to end by a signal, which may come in the midst of anything that it does with that word."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from streamrl.learner.process.stop_flag import StopFlag

ROOT = Path(__file__).parents[2]

# A signal at one line after the other of what is done in the midst: of Python's own Event too, where it takes its lock.
_AT_EACH_LINE = """
import signal, sys
from streamrl.learner.process.stop_flag import StopFlag

def signalled_at(line, what):
    flag, left = StopFlag(), line
    def trace(frame, event, _):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGTERM)
        return trace
    signal.signal(signal.SIGTERM, lambda *_: flag.set())
    sys.settrace(trace)
    what(flag)
    sys.settrace(None)
    return flag.is_set()

for line in range(1, 40):
    signalled_at(line, lambda flag: flag.wait(0.0))
    signalled_at(line, lambda flag: flag.wait(0.02))
    assert signalled_at(line, lambda flag: flag.set())
print("ended")
"""


def test_a_signal_may_come_in_the_midst_of_a_wait_and_of_another_signal() -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _AT_EACH_LINE], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for itself")
    assert (done.returncode, done.stdout.strip()) == (0, "ended"), done.stderr


def test_who_waits_hears_of_it_soon_and_else_waits_as_long_as_asked() -> None:
    flag = StopFlag()
    began = time.monotonic()
    assert not flag.wait(0.1)
    assert time.monotonic() - began >= 0.1
    threading.Timer(0.1, flag.set).start()
    assert flag.wait(60)
    assert flag.wait()
    assert time.monotonic() - began < 30
