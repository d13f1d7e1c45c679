"""Replays as processes: killed at any place and resumed, they end where the undisturbed one ends; and a replay of a
live run ends where that run did."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.record.frames import Origin
from streamrl.record.session import record
from streamrl.record.tap import Tap
from streamrl.record.write import RecordingWriter
from streamrl.transport.connection import connect
from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import snapshot
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, lines, made_up_worker, make_run, running_learner
from tests.replay_world import last_tensors, make_entries, make_recording, make_replay_run, run_replay, same_bits

PATIENCE_S = 120


def start_replay(config: schema.Config, recording: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "learner", "--config", str(config.folder / "config.yaml")]
    with (config.folder / "learner.out").open("ab") as out:
        return subprocess.Popen(
            [*command, "--replay", str(recording)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )


def replay_with_kills(config: schema.Config, recording: Path, *, steps: list[int], seed: int) -> None:
    """Killed soon after each of these steps, and then left alone."""
    chance = random.Random(seed)

    def newest_step() -> int:
        return max((line["step"] for line in lines(config.folder / "metrics.jsonl")), default=0)

    for step in steps:
        with start_replay(config, recording) as process:
            try:
                wait_until(
                    lambda process=process, step=step: process.poll() is not None or newest_step() >= step,
                    description=f"step {step} is made",
                    timeout_s=PATIENCE_S,
                )
                threading.Event().wait(chance.uniform(0, 0.05))
            finally:
                process.kill()
    with start_replay(config, recording) as process:
        assert process.wait(PATIENCE_S) == 0, (config.folder / "learner.out").read_text()[-2000:]


def compare_killed_and_whole(folder: Path, *, num_steps: int, kills: list[int], seed: int) -> None:
    sections = {
        "training": schema.Training(groups_per_step=4, max_steps=num_steps),
        "checkpoint": schema.Checkpoint(every_steps=3),
        "algorithm": schema.Algorithm(kl=schema.Kl(coefficient=0.05)),
    }
    whole = make_replay_run(folder, name="whole", **sections)
    recording = make_recording(folder / "recording", whole, make_entries(whole, range(4 * num_steps)))
    run_replay(whole, recording)
    killed = make_replay_run(folder, name="killed", **sections)

    replay_with_kills(killed, recording, steps=kills, seed=seed)

    assert same_bits(last_tensors(whole), last_tensors(killed))
    assert len(list((killed.folder / "epochs").iterdir())) == len(kills) + 1


def test_a_replay_killed_in_mid_run_and_resumed_ends_like_the_whole_one(tmp_path: Path) -> None:
    compare_killed_and_whole(tmp_path, num_steps=10, kills=[5], seed=1)


@pytest.mark.long
def test_a_replay_of_fifty_steps_killed_at_ten_places_ends_like_the_whole_one(tmp_path: Path) -> None:
    kills = sorted(random.Random(7).sample(range(1, 49), 10))
    compare_killed_and_whole(tmp_path, num_steps=50, kills=kills, seed=7)


def test_the_replay_of_a_live_run_gives_the_weights_of_that_run(tmp_path: Path, redis_url: str, run_name: str) -> None:
    live = make_run(tmp_path, name=run_name)
    recording = tmp_path / "recording"
    with (
        connect(redis_url, live.redis) as client,
        made_up_worker(live, redis_url),
        running_learner(live, redis_url) as learner,
    ):
        info = wait_until(lambda: snapshot(client, Keys(run_name)).run, description="the run", timeout_s=60)
        tap = Tap(client, Keys(run_name), run_uid=info.uid)
        origin = Origin(run=run_name, run_uid=info.uid, fingerprint=info.fingerprint, model=live.model.path)
        with RecordingWriter(recording, origin, file_bytes=1 << 20, max_bytes=1 << 30) as writer:
            record(tap, writer, stopped=lambda: learner.poll() is not None, follow=True, show=lambda: None)
        assert learner.wait(PATIENCE_S) == 0
    again = make_run(tmp_path, name="again")

    assert run_replay(again, recording) == "finished"

    exported = [safetensors.torch.load_file(run.folder / "export" / "model.safetensors") for run in (live, again)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
