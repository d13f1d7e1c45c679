"""How often does a test fail on a busy machine? Runs it N times, each in its own process, beside a load on all cores;
then adds a row to `tests/STABILITY.md`, and shows the output of failed runs.

    python -m tests.stability tests/redis/test_top.py::test_it_follows_the_size_of_the_window --times 50
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from streamrl.process import dying_with_us

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "STABILITY.md"
_RUN_S = 600.0
_SHOWN_CHARS = 3000  # of a failed run's output


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(num_processes):
            # Tied to this process, so that no load outlives it.
            command = dying_with_us([sys.executable, "-c", "while True: pass"], by=signal.SIGKILL)
            busy = stack.enter_context(subprocess.Popen(command))
            stack.callback(busy.kill)
        yield


def failure(test: str) -> str:
    """Return the output of a failed run; empty if it passed."""
    command = [sys.executable, "-m", "pytest", test, "-q", "-m", "not root", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not over after {_RUN_S:g} s"
    if done.returncode in (4, 5):  # pytest found no such test
        raise SystemExit(f"error: {test}: {done.stdout[-_SHOWN_CHARS:]}{done.stderr[-_SHOWN_CHARS:]}")
    return (done.stdout + done.stderr)[-_SHOWN_CHARS:] if done.returncode else ""


def commit() -> str:
    """Return the commit, with a + if files other than the table differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def note(test: str, times: int, num_failed: int, *, beside: str) -> None:
    row = f"| {time.strftime('%Y-%m-%d')} | {commit()} | `{test}` | {beside} | {times} | {num_failed} |\n"
    with TABLE.open("a") as file:
        file.write(row)
    print(row, end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the number of failed runs, 100 at most."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", metavar="PATH::TEST", help="as pytest takes it; a whole file, too")
    parser.add_argument("--times", type=int, default=50, metavar="N")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--load", type=int, default=cores, metavar="N", help="processes beside it; by default one a core"
    )
    asked = parser.parse_args(arguments)
    num_failed = 0
    with load(asked.load):
        for number in range(1, asked.times + 1):
            if said := failure(asked.test):
                num_failed += 1
                print(f"--- run {number} failed\n{said}")
            print(f"{number} of {asked.times} runs, {num_failed} failed", flush=True)
    note(
        asked.test,
        asked.times,
        num_failed,
        beside=f"{asked.load} busy processes; load {os.getloadavg()[1]:.0f}, {cores} cores",
    )
    return min(num_failed, 100)


if __name__ == "__main__":
    sys.exit(main())
