"""How a rank leaves the others when it has failed: at once where GPUs are, whose library waits for all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from streamrl.errors import TrainingError
from streamrl.learner.process.ranks import join_world

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was left, of groups that are not there."""
    found: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("all"))
    return found


@pytest.mark.parametrize(
    ("has_gpu", "size", "fails", "leaves"),
    [
        (True, "2", True, []),
        (True, "2", False, ["all"]),
        (True, "1", True, ["all"]),
        (False, "2", True, ["all"]),
        (False, "2", False, ["all"]),
    ],
)
def test_a_rank_that_fails_among_gpus_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, left: list[str], has_gpu: bool, size: str, fails: bool, leaves: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    try:
        with join_world({**TWO, "WORLD_SIZE": size}, timeout_s=1):
            if fails:
                raise TrainingError("out of memory")
    except TrainingError:
        assert fails
    assert left == leaves


SCRIPT = """
import atexit
import torch.distributed as dist
from streamrl.learner.process.ranks import end_if_joined
atexit.register(print, "waited for the others")
dist.is_initialized = lambda: {joined}
end_if_joined(3, ValueError("why it failed"))
print("went on")
"""


@pytest.mark.parametrize("joined", [True, False])
def test_its_process_ends_with_the_reason_and_without_what_waits(joined: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(joined=joined)], capture_output=True, text=True, timeout=240, check=False
    )
    if joined:
        assert (done.returncode, done.stdout) == (3, "")
        assert "ValueError: why it failed" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "went on\nwaited for the others\n")
