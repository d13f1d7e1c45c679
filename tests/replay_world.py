"""A recording made by hand, and replays of it: no Redis, no worker, a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.terms import ancestry
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.process.ranks import World
from streamrl.learner.replay import replay
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import encode_group
from streamrl.versions import make_version
from tests.integration.learner_world import make_run
from tests.learner_cases import group_of

RECORDED = "recorded"  # uid of the recorded run
_WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def make_replay_run(folder: Path, *, name: str = "again", **sections: Any) -> schema.Config:
    return make_run(folder, name=name, **sections)


def make_entries(config: schema.Config, numbers: range, *, seed: int = 0, equal: Container[int] = ()) -> list[Entry]:
    """Make answers to these tickets as workers would: a step or two old, and all different.

    `equal`: tickets whose samples all have one reward.
    """
    fingerprint = read_tokenizer_info(config.model.path).fingerprint
    rng = np.random.default_rng(seed)
    entries = []
    for number in numbers:
        step = max(0, number // config.training.groups_per_step - 1)
        lengths = rng.integers(1, config.sampling.max_tokens, config.sampling.num_samples)
        group = group_of(
            ticket=number,
            run_uid=RECORDED,
            fingerprint=fingerprint,
            rewards=[1.0] * len(lengths) if number in equal else rng.normal(size=len(lengths)).tolist(),
            responses=[rng.integers(3, 40, n).tolist() for n in lengths],
            logprobs=[(-rng.exponential(2.0, n)).tolist() for n in lengths],
            version=make_version(1, step),
            step=step,
        )
        header, body = encode_group(group)
        entries.append(
            Entry(
                id=f"{1000 + number}-0",
                number=number,
                run_uid=RECORDED,
                header=header,
                body=body,
                identity=group.header.identity,
                ticket_entry=f"{number}-0",
            )
        )
    return entries


def make_recording(folder: Path, config: schema.Config, entries: list[Entry]) -> Path:
    tokenizer_info = read_tokenizer_info(config.model.path)
    origin = Origin(run="live", run_uid=RECORDED, fingerprint=tokenizer_info.fingerprint, model=config.model.path)
    with RecordingWriter(folder, origin, file_bytes=20_000, max_bytes=1 << 30) as writer:
        writer.append(entries)
    return folder


def run_replay(config: schema.Config, recording: Path) -> str:
    return replay(config=config, folder=recording, world=_WORLD, stop=threading.Event(), environment={})


def last_state(config: schema.Config) -> dict[str, Any]:
    checkpoint = CheckpointRoot(config.folder).newest_complete(ancestry(config.folder))
    assert checkpoint is not None, "there is a checkpoint"
    return checkpoint.state.to_json()


def last_tensors(config: schema.Config) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's weights, optimizer and random state."""
    checkpoint = CheckpointRoot(config.folder).newest_complete(ancestry(config.folder))
    assert checkpoint is not None, "there is a checkpoint"
    [path] = checkpoint.folder.glob("train-*.safetensors")
    return safetensors.torch.load_file(path)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
