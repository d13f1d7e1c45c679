"""vLLM's processes end with the worker that wanted them, however vLLM would start them by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.integration.lone_engine import START_METHOD
from tests.tiny_models import make_model
from tests.worker_processes import ROOT, alive, command_of, descendants, shared_by


# Where nobody says how, ours are spawned: with that said it is the same again.
@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_worker_that_is_killed_leaves_no_engine(tmp_path: Path, method: str | None) -> None:
    """An engine that is left holds its GPU, and whoever comes next finds no memory."""
    leave_none(tmp_path, method, {})


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_no_rank_of_its_engine(tmp_path: Path) -> None:
    leave_none(tmp_path, "spawn", {"tensor_parallel_size": 2})


def leave_none(tmp_path: Path, method: str | None, engine_args: dict[str, Any]) -> None:
    told = {name: text for name, text in os.environ.items() if name != START_METHOD}
    told |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    told |= {} if method is None else {START_METHOD: method}
    model = make_model(tmp_path / "model", kv_heads=2)
    command = [sys.executable, "-m", "tests.integration.lone_engine", str(model), json.dumps(engine_args)]
    with (tmp_path / "said").open("wb") as said:
        worker = subprocess.Popen(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, stderr=said)
    try:
        assert worker.stdout is not None
        assert b"ready\n" in worker.stdout, (tmp_path / "said").read_text()[-2000:]  # reads on until that line
        started = descendants(worker.pid)
        shared = shared_by(started)
        groups = {os.getpgid(pid) for pid in started if "EngineCore" in command_of(pid)}
    finally:
        worker.kill()
        worker.communicate()
    assert groups
    assert os.getpgid(0) not in groups, "Ctrl-C here would end it before its samples"
    assert shared or not engine_args
    try:
        wait_until(lambda: not alive(started), description="its engine has ended")
        wait_until(lambda: not any(path.exists() for path in shared), description="what they shared has gone")
    finally:
        for pid in alive(started):
            os.kill(pid, 9)
