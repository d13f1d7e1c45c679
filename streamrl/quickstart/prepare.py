"""What the quickstart needs before its run: data, an untrained model, the warmed-up model, and a reward model.

    data ─► base model ─┬─► python -m learner.sft      ─► sft/           the start of the run, "before"
                        └─► streamrl reward train      ─► reward-model/  at the same time, on the other core

Everything is made in the run's folder, from the seed. Takes half a minute; blocks on the two processes, whose last line
is shown while they work.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.launch.processes import Command
from streamrl.quickstart.base_model import write_base_model
from streamrl.quickstart.task import Example, demonstrate, examples, spoil
from streamrl.showcase.making import program, run_all

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
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def write_data(folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    held_out = list({example.prompt: example for example in islice(examples(rng), _NUM_HELD_OUT)}.values())
    unseen = {example.prompt for example in held_out}
    rest = (example for example in examples(rng) if example.prompt not in unseen)
    _write(folder / "validation.jsonl", map(_to_prompt, held_out))
    _write(folder / "train.jsonl", map(_to_prompt, islice(rest, _NUM_TRAIN)))
    demonstrations = islice(rest, _NUM_DEMONSTRATIONS)
    _write(
        folder / "demonstrations.jsonl",
        ({"prompt": one.prompt, "completion": demonstrate(one, rng)} for one in demonstrations),
    )
    pairs = islice(rest, _NUM_PAIRS)
    _write(
        folder / "pairs.jsonl",
        ({"prompt": one.prompt, "chosen": one.answer, "rejected": spoil(one, rng)} for one in pairs),
    )


def _to_prompt(example: Example) -> dict[str, str]:
    return {"prompt": example.prompt, "answer": example.answer}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _warm_up(folder: Path, seed: int) -> Command:
    options = {
        "--model": folder / "base",
        "--data": folder / "data" / "demonstrations.jsonl",
        "--output": folder / "sft",
        "--seed": seed,
        "--threads": 1,
    }
    return program("warm-up", ["-m", "learner.sft"], options, logs=folder / "logs")


def _train_reward_model(folder: Path, seed: int) -> Command:
    options = {
        "--model": folder / "base",
        "--pairs": folder / "data" / "pairs.jsonl",
        "--output": folder / "reward-model",
        "--lr": 1e-3,
        "--seed": seed,
        "--threads": 1,
    }
    words = ["-m", "streamrl.cli.main", "reward", "train"]
    return program("reward model", words, options, logs=folder / "logs")
