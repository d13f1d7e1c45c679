"""What the quickstart needs before its run: data, an untrained model, the warmed-up model, and a reward model.

    data ─► base model ─┬─► python -m learner.model.sft      ─► sft/           the start of the run, "before"
                        └─► streamrl reward train      ─► reward-model/  at the same time, on the other core

Everything is made in the run's folder, from the seed. Takes half a minute; blocks on the two processes, whose last line
is shown while they work.

The quickstart as a demonstration: what it says, how its answers are judged, how it is prepared.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.config.schema import Config
from streamrl.demos.quickstart_model import write_base_model
from streamrl.demos.quickstart_task import EXPLANATION, demonstrate, examples, spoil
from streamrl.demos.report import Task
from streamrl.demos.run import Showcase, as_overrides, program, run_all, write_rows
from streamrl.ops.launch.processes import Command

_NUM_TRAIN = 16_384
_NUM_HELD_OUT = 400
_NUM_DEMONSTRATIONS = 16_000  # 250 steps of 64 rows
_NUM_PAIRS = 4_000


def prepare(config: Config, say: Callable[[str], None]) -> list[str]:
    """`say` is told, again and again, what is going on. Returns the settings of the run that follow from where things
    were made, and from what the reward model turned out."""
    folder, seed = config.folder, config.seed
    say("writing the data and an untrained model")
    write_data(folder / "data", seed=seed)
    write_base_model(folder / "base", seed=seed)
    run_all([_warm_up(folder, seed), _train_reward_model(folder, seed)], say)
    return overrides(folder)


def overrides(folder: Path) -> list[str]:
    settings: dict[str, object] = {
        "model.path": str(folder / "sft"),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.validation": str(folder / "data" / "validation.jsonl"),
        "reward_server.model": str(folder / "reward-model"),
    }
    summary = folder / "reward-model" / "reward_summary.json"
    if summary.exists():
        found = json.loads(summary.read_text())
        settings |= {f"reward_server.{name}": float(found[name]) for name in ("reward_mean", "reward_std")}
    return as_overrides(settings)


def write_data(folder: Path, *, seed: int) -> None:
    rng = random.Random(seed)
    held_out = list({example.prompt: example for example in islice(examples(rng), _NUM_HELD_OUT)}.values())
    unseen = {example.prompt for example in held_out}
    rest = (example for example in examples(rng) if example.prompt not in unseen)
    write_rows(folder / "validation.jsonl", map(asdict, held_out))
    write_rows(folder / "train.jsonl", map(asdict, islice(rest, _NUM_TRAIN)))
    write_rows(
        folder / "demonstrations.jsonl",
        ({"prompt": one.prompt, "completion": demonstrate(one, rng)} for one in islice(rest, _NUM_DEMONSTRATIONS)),
    )
    write_rows(
        folder / "pairs.jsonl",
        ({"prompt": one.prompt, "chosen": one.answer, "rejected": spoil(one, rng)} for one in islice(rest, _NUM_PAIRS)),
    )


def _warm_up(folder: Path, seed: int) -> Command:
    options = {"--data": folder / "data" / "demonstrations.jsonl", "--output": folder / "sft"}
    return _training("warm-up", ["-m", "streamrl.learner.model.sft"], options, folder, seed)


def _train_reward_model(folder: Path, seed: int) -> Command:
    options = {"--pairs": folder / "data" / "pairs.jsonl", "--output": folder / "reward-model", "--lr": 1e-3}
    return _training("reward model", ["-m", "streamrl.ops.cli.main", "reward", "train"], options, folder, seed)


def _training(name: str, words: list[str], options: dict[str, Any], folder: Path, seed: int) -> Command:
    shared = {"--model": folder / "base", "--seed": seed, "--threads": 1}
    return program(name, words, shared | options, logs=folder / "logs")


TASK = Task(
    source="exact",
    question=lambda prompt, _: prompt,
    is_right=lambda completion, fields: completion == fields["answer"],
    prepared="data, warm-up and reward model",
)
QUICKSTART = Showcase(name="quickstart", explanation=EXPLANATION, task=TASK, check=lambda _: None, prepare=prepare)
