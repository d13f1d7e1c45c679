"""A process of vLLM's leaves its worker's group, and ends with whoever has started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.worker_processes import ROOT, alive

_LEAVES = """
import os, sys
from streamrl.workers.engines.vllm.plugin import leave_group_of
for _ in range(2):  # a plugin may be loaded twice
    leave_group_of(int(sys.argv[1]))
print(os.getpgid(0) == os.getsid(0) == os.getpid(), os.getpgid(0))
"""
# A rank that is still importing when its EngineCore is killed.
_RANK = """
import multiprocessing, os, sys, time
from pathlib import Path
from streamrl.workers.engines.vllm.plugin import _die_with

def rank(folder, owner):
    (folder / "rank").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.01)
    _die_with(owner)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    context.Process(target=rank, args=(Path(sys.argv[1]), int(sys.argv[2]))).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("has_own_group", [False, True])
def test_it_leaves_the_group_of_its_worker_and_no_other(has_own_group: bool) -> None:
    """A reward function that uses vLLM has a session of its own, in which all that it starts is killed."""
    group = 0 if has_own_group else None
    command = [sys.executable, "-c", _LEAVES, str(os.getpid())]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, process_group=group
    )
    leads_session, own_group = done.stdout.split()
    assert leads_session == str(not has_own_group)
    assert int(own_group) != os.getpgid(0)


def test_a_rank_whose_engine_died_before_it_could_be_told_dies_too(tmp_path: Path) -> None:
    """The worker lives on, and starts another engine."""
    (tmp_path / "core.py").write_text(_RANK)
    command = [sys.executable, str(tmp_path / "core.py"), str(tmp_path), str(os.getpid())]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as core:
        try:
            rank = int(wait_until(lambda: _text(tmp_path / "rank"), description="the rank has started"))
        finally:
            core.kill()
    (tmp_path / "go").touch()
    wait_until(lambda: not alive({rank}), description="the rank has died", timeout_s=30)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
