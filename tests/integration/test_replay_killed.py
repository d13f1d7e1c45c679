"""Replays as processes: killed at any place and resumed, they end where the undisturbed one ends; and a replay of a
live run ends where that run did."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.ops.record.tap import Tap, record
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from tests.faults.agents import descendants, is_alive
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, lines, made_up_worker, make_run, running_learner
from tests.replay_world import last_tensors, make_entries, make_recording, make_replay_run, run_replay, same_bits

PATIENCE_S = 240


@contextmanager
def replaying(config: schema.Config, recording: Path, *, processes: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Afterwards nothing of it is alive, however it was left."""
    agent = ["-m", "streamrl.learner.process.agent", "--standalone", f"--nproc-per-node={processes}", "--"]
    command = [sys.executable, *(agent if processes else ["-m", "learner"])]
    with (config.folder / "learner.out").open("a") as out:
        process = subprocess.Popen(
            [*command, "--config", str(config.folder / "config.yaml"), "--replay", str(recording)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=out,
            stderr=out,
            text=True,
        )
    try:
        yield process
    finally:
        tree = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, tree)), description="all of it has ended", timeout_s=PATIENCE_S)


def replay_with_kills(
    config: schema.Config, recording: Path, *, steps: list[int], seed: int, processes: Sequence[int] = (0,)
) -> None:
    """Killed soon after each of these steps, and then left alone; in turn with so many ranks."""
    chance = random.Random(seed)
    worlds = cycle(processes)

    def newest_step() -> int:
        return max((line["step"] for line in lines(config.folder / "metrics.jsonl")), default=0)

    for step in steps:
        with replaying(config, recording, processes=next(worlds)) as process:
            wait_until(
                lambda process=process, step=step: process.poll() is not None or newest_step() >= step,
                description=f"step {step} is made",
                timeout_s=PATIENCE_S,
            )
            threading.Event().wait(chance.uniform(0, 0.05))
    with replaying(config, recording, processes=next(worlds)) as process:
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
    assert len(list((killed.folder / "terms").iterdir())) == len(kills) + 1


def test_a_replay_killed_in_mid_run_and_resumed_ends_like_the_whole_one(tmp_path: Path) -> None:
    compare_killed_and_whole(tmp_path, num_steps=10, kills=[5], seed=1)


@pytest.mark.long
def test_a_replay_of_fifty_steps_killed_at_ten_places_ends_like_the_whole_one(tmp_path: Path) -> None:
    kills = sorted(random.Random(7).sample(range(1, 49), 10))
    compare_killed_and_whole(tmp_path, num_steps=50, kills=kills, seed=7)


@pytest.mark.long
def test_in_float64_the_number_of_ranks_may_change_twice_without_a_difference(tmp_path: Path) -> None:
    sections = {
        "model": schema.Model(path=str(tmp_path / "model"), dtype="float64"),
        "training": schema.Training(groups_per_step=4, max_steps=15),
        "checkpoint": schema.Checkpoint(every_steps=2),
    }
    alone = make_replay_run(tmp_path, name="alone", **sections)
    recording = make_recording(tmp_path / "recording", alone, make_entries(alone, range(60)))
    run_replay(alone, recording)
    more = make_replay_run(tmp_path, name="more", **sections)

    replay_with_kills(more, recording, steps=[5, 10], seed=3, processes=(0, 2, 0))

    ours, theirs = last_tensors(alone), last_tensors(more)
    weights = [name for name in ours if name.startswith("master/")]
    assert ours.keys() == theirs.keys()
    assert {ours[name].dtype for name in weights} == {torch.float64}
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in weights)
    # The model's own norms round to fp32: where a sum in another order crosses such an edge, a weight is some 1e-9 off
    # (6e-9 was seen). 0: they would not have been two ranks.
    assert 0 < largest <= 1e-7, largest


def test_the_replay_of_a_live_run_gives_the_weights_of_that_run(tmp_path: Path, redis_url: str, run_name: str) -> None:
    live = make_run(tmp_path, name=run_name)
    recording = tmp_path / "recording"
    with (
        connect(redis_url, live.redis) as client,
        made_up_worker(live, redis_url),
        running_learner(live, redis_url) as learner,
    ):
        info = wait_until(lambda: snapshot(client, Keys(run_name)).run, description="the run", timeout_s=240)
        tap = Tap(client, Keys(run_name), run_uid=info.uid)
        origin = Origin(run=run_name, run_uid=info.uid, fingerprint=info.fingerprint, model=live.model.path)
        with RecordingWriter(recording, origin, file_bytes=1 << 20, max_bytes=1 << 30) as writer:
            record(tap, writer, stopped=lambda: learner.poll() is not None, follow=True, show=lambda: None)
        assert learner.wait(PATIENCE_S) == 0
    again = make_run(tmp_path, name="again")

    assert run_replay(again, recording) == "finished"

    exported = [safetensors.torch.load_file(run.folder / "export" / "model.safetensors") for run in (live, again)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
