"""An agent that is told to end does so at whatever moment of its life: once, in order and with 0. The ranks are
stand-ins, and so is torchrun where it is not what may go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.learner.process.job import EXIT_ON_SIGNAL
from tests.helpers import wait_until
from tests.stand_in_ranks import FOLDER, HOLD_AT, OF_A_RANK, OF_TORCHRUN

ROOT = Path(__file__).parents[2]
MOMENTS = ("start", *OF_TORCHRUN, *OF_A_RANK)
GRACE_S = 30.0
_SPREAD_S = {"start": 0.3, "rendezvous": 0.8, "first failure": 0.1, "end": 0.05}

_AGENT = """
import sys
from pathlib import Path
from streamrl.learner.process import agent
from tests import stand_in_ranks
agent.PRELOADED = sys.argv[1].split(",")
agent._RANK = Path(stand_in_ranks.__file__)
own = {"torchrun": stand_in_ranks.torchrun} if sys.argv[2] == "stand-in" else {}
agent.main(sys.argv[3:], **own)
"""
_STAND_IN = ("tests.stand_in_ranks", "stand-in")
REAL = ("streamrl.learner.process.fork_server,tests.stand_in_ranks", "torch")


@contextmanager
def agent(
    folder: Path,
    moment: str,
    *,
    which: Sequence[str] = _STAND_IN,
    options: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """It holds at this moment."""
    environment = {**os.environ, FOLDER: str(folder), HOLD_AT: moment, "PYTHONPATH": str(ROOT)}
    of_torchrun = ["--nproc-per-node=1", "--max-restarts=3", f"--shutdown-timeout={GRACE_S:g}", *options]
    with (folder / "out").open("w") as out:
        command = [sys.executable, "-c", _AGENT, *which, *of_torchrun, "--", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def reached(folder: Path) -> list[str]:
    return (folder / "reached").read_text().splitlines() if (folder / "reached").exists() else []


def heeds_signals(pid: int) -> bool:
    [caught] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def has_died(folder: Path, moment: str) -> bool:
    """A rank which torchrun does not know of yet, or is about to log."""
    failed = [line.partition(" ")[2] for line in reached(folder) if line.startswith("failed ")]
    return moment == "rank has failed" and any(not Path("/proc", pid).exists() for pid in failed)


def await_moment(process: subprocess.Popen[str], folder: Path, moment: str) -> None:
    def is_there() -> bool:
        assert process.poll() is None, (folder / "out").read_text()
        return (
            heeds_signals(process.pid) if moment == "start" else moment in reached(folder) or has_died(folder, moment)
        )

    wait_until(is_there, description=f"the agent is at: {moment}", timeout_s=240)


def ends_in_order(process: subprocess.Popen[str], folder: Path, *, code: int = 0) -> None:
    began = time.monotonic()
    process.wait(60)
    said = (folder / "out").read_text()
    assert process.returncode == code, said
    assert time.monotonic() - began < GRACE_S
    assert "SignalException" not in said
    assert "Logging error" not in said
    assert said.count("learner: ending on") <= 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_agent_that_is_told_to_end_does_so_at_any_moment(tmp_path: Path, moment: str) -> None:
    with agent(tmp_path, moment) as process:
        await_moment(process, tmp_path, moment)
        process.send_signal(signal.SIGTERM)
        ends_in_order(process, tmp_path)
    # Nothing holds it at its start: it may be at work when the signal arrives.
    was_at_work = "step" in reached(tmp_path) if moment == "start" else moment in OF_A_RANK[1:] or moment == "end"
    assert ("finished" in reached(tmp_path)) is was_at_work, "who has begun a step finishes it"
    assert "restart" not in reached(tmp_path) or moment == "restart", "it started its ranks again"


# What the interpreter does at its end takes a while, and it puts handlers of its own back.
_OVER = """
import os, signal
from streamrl.learner.process.agent import main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
late = Late()
main(["--nproc-per-node=1", "--", "x"], torchrun=lambda words: None)
"""


def test_an_agent_that_is_told_when_all_is_over_has_ended_well() -> None:
    ended = subprocess.run([sys.executable, "-c", _OVER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_to_be_told_again_changes_nothing(tmp_path: Path) -> None:
    with agent(tmp_path, "save") as process:
        await_moment(process, tmp_path, "save")
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        process.wait(60)
    assert process.returncode == 0, (tmp_path / "out").read_text()
    assert reached(tmp_path)[-1] == "finished"


def test_a_machine_that_leaves_the_run_to_others_says_so_by_its_exit_code(tmp_path: Path) -> None:
    with agent(tmp_path, "step", words=["--elastic"]) as process:
        await_moment(process, tmp_path, "step")
        process.send_signal(signal.SIGTERM)
        ends_in_order(process, tmp_path, code=EXIT_ON_SIGNAL)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", MOMENTS)
def test_torchs_own_torchrun_ends_ten_times_of_ten_at_any_moment(tmp_path: Path, moment: str) -> None:
    # No second machine comes to its rendezvous. What torchrun does by itself nobody holds: it is met at ten points.
    words = {"rendezvous": ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]}
    seen_as = {"rendezvous": "start", "first failure": "rank has failed", "end": "finished"}
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with agent(folder, moment, which=REAL, options=words.get(moment, [])) as process:
            await_moment(process, folder, seen_as.get(moment, moment))
            time.sleep(attempt * _SPREAD_S.get(moment, 0.0))
            for _ in range(1 + attempt % 2):
                process.send_signal(signal.SIGTERM)
            ends_in_order(process, folder)
