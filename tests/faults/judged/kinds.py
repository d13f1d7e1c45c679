"""The kinds of runs that are judged: each with a folder, settings, a tiny model, and distinct prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import schema
from tests.integration.learner_world import make_run

MAX_LAG = 2  # steps
RUN = "judged"
DTYPE = "float32"
REWARD = f"{Path(__file__).with_name('reward.py')}:score"
_NUM_PROMPTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    ranks: int = 1
    lora: bool = False
    tls: bool = False  # and users with minimal rights
    files: bool = False  # weights go through a folder
    light: bool = False  # stand-ins: no tensors and no engine, so many more faults per minute


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="plain", ranks=2),
        Kind(name="lora", lora=True),
        Kind(name="files", files=True),
        Kind(name="tls", tls=True),
        Kind(name="light", light=True),
    )
}


def make(kind: Kind, folder: Path, *, seed: int) -> schema.Config:
    """Short waits, so that much happens; more prompts than needed; tickets that fail die at once."""
    model = schema.Model(path=str(folder / "model"), dtype="float32", lora=schema.Lora(rank=4) if kind.lora else None)
    config = make_run(
        folder,
        name=RUN,
        seed=seed,
        model=model,
        data=schema.Data(train=str(folder / "prompts.jsonl"), max_prompt_tokens=32),
        rewards={"made_up": schema.FunctionReward(type="function", target=REWARD)},
        training=schema.Training(groups_per_step=4, max_steps=-1, max_epochs=1000, max_failed_in_row=10_000),
        # Otherwise a model that no longer stops within the limit would have all its groups dropped.
        algorithm=schema.Algorithm(mask_unfinished=False),
        lag=schema.Lag(max_steps=MAX_LAG, stale="drop"),
        weights=schema.Weights(dtype=DTYPE, anchor_every=1, store=store_of(kind, folder)),
        checkpoint=schema.Checkpoint(every_steps=3),
        redis=schema.Redis(connect_timeout_s=2.0, reply_timeout_s=3.0),
        worker=schema.Worker(
            engine="transformers", threads=1, grace_s=1.0, lease_s=5.0, max_attempts=1, max_groups_in_flight=8
        ),
        learner=schema.Learner(threads=1, lease_s=3.0, idle_timeout_s=60.0),
    )
    rows = [{"text": f"say {number}:", "number": number} for number in range(_NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def store_of(kind: Kind, folder: Path) -> str:
    return f"file:{folder / 'blobs'}" if kind.files else "redis:"
