"""A rank that is at its disk for minutes is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config import schema
from tests.integration.learner_world import ROOT
from tests.replay_world import last_state, make_entries, make_recording, make_replay_run


@pytest.mark.long
def test_ranks_wait_for_one_that_verifies_or_seals_a_checkpoint_for_longer_than_the_loop_waits(tmp_path: Path) -> None:
    config = make_replay_run(
        tmp_path, training=schema.Training(groups_per_step=4, max_steps=2), checkpoint=schema.Checkpoint(every_steps=9)
    )
    make_recording(tmp_path / "recording", config, make_entries(config, range(8)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}"]
    ended = subprocess.run(
        [sys.executable, *command, "-m", "tests.integration.slow_disk_rank", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert last_state(config)["step"] == 2
