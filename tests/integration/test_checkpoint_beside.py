"""Ranks that die while a checkpoint is written beside their steps, each at another place, cost these steps alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from streamrl.learner.checkpoints.terms import ancestry
from tests.integration.learner_world import ROOT
from tests.replay_world import make_entries, make_recording, make_replay_run, same_bits

_EVERY_STEPS = 6  # so many that the loop goes on before it has to wait
_NUM_STEPS = 17
# Which rank dies, where; and the step of the checkpoint that is there then.
DEATHS = [
    ("1", "shard.part", None),  # in the midst of its file
    ("0", "shard.synced", None),  # between ranks: its own is durable, of the other nobody knows
    ("1", "shard.synced", None),
    ("0", "checkpoint.written", None),  # all are, and nothing says so
    ("0", "checkpoint.sealed", None),
    ("0", "checkpoint.renamed", _EVERY_STEPS),
    ("0", "prune.aside", 2 * _EVERY_STEPS),  # the second is there, and the first is neither kept nor gone
]
_PATIENCE_S = 180


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ranks_that_die_beside_the_loop_at_every_place_end_like_a_run_that_nobody_disturbed(tmp_path: Path) -> None:
    sections = {
        "training": schema.Training(groups_per_step=4, max_steps=_NUM_STEPS),
        "checkpoint": schema.Checkpoint(every_steps=_EVERY_STEPS, keep_last=1, keep_best=0),
    }
    whole = make_replay_run(tmp_path, name="whole", **sections)
    make_recording(tmp_path / "recording", whole, make_entries(whole, range(4 * _NUM_STEPS)))
    run_ranks(tmp_path, "whole")
    killed = make_replay_run(tmp_path, name="killed", **sections)
    for rank, point, step in DEATHS:
        run_ranks(tmp_path, "killed", rank, point)
        found = newest(killed)
        assert (found.state.step if found else None) == step, f"after the death of rank {rank} at {point}"
    run_ranks(tmp_path, "killed")
    assert len(list((killed.folder / "terms").iterdir())) == len(DEATHS) + 1
    assert all(same_bits(*both) for both in zip(shards(whole), shards(killed), strict=True))


def run_ranks(folder: Path, *words: str) -> None:
    """To its end; or to its death, where words say so."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--log-dir={folder / 'logs'}"]
    ended = subprocess.run(
        [sys.executable, *command, "-m", "tests.integration.checkpoint_rank", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    dies = len(words) > 1
    assert ended.returncode == int(dies), ended.stderr[-4000:]
    assert ("SIGKILL" in ended.stderr) is dies, ended.stderr[-4000:]


def newest(config: schema.Config) -> Checkpoint | None:
    return CheckpointRoot(config.folder).newest_complete(ancestry(config.folder))


def shards(config: schema.Config) -> list[dict[str, torch.Tensor]]:
    found = newest(config)
    assert found is not None, "there is a checkpoint"
    return [safetensors.torch.load_file(path) for path in sorted(found.folder.glob("train-*.safetensors"))]
