"""What the demo needs before its run: the model, which is kept between runs, and data, which the seed decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.config.schema import Config
from streamrl.demo import model, sums
from streamrl.extras import need

_NUM_HELD_OUT = 160
_NUM_TRAIN = 2_000  # of the 4200 sums there are


def check(_: Config) -> None:
    need("the demo", "gguf", "reasoning_gym", extra="demo")
    model.check_gguf(model.find_gguf())


def prepare(config: Config, say: Callable[[str], None]) -> list[str]:
    """Says again and again what is going on. The settings of the run that follow from where things were made."""
    folder = config.folder
    say("writing the data")
    write_data(folder / "data", sums.entries(config.seed))
    made = model.make_model(model.find_gguf(), config.dir / "models", model.converter(folder / "logs", say))
    settings = {
        "model.path": made,
        "data.train": folder / "data" / "train.jsonl",
        "data.validation": folder / "data" / "validation.jsonl",
    }
    return [f"{key}={json.dumps(str(path))}" for key, path in settings.items()]


def write_data(
    folder: Path,
    entries: Iterable[Mapping[str, Any]],
    *,
    num_held_out: int = _NUM_HELD_OUT,
    num_train: int = _NUM_TRAIN,
) -> None:
    """The first sums are held out, each once, and no text of theirs is trained. Short sums are few: those that are
    trained come again, as often as reasoning-gym asks for them."""
    entries = iter(entries)
    held_out: dict[str, Mapping[str, Any]] = {}
    while len(held_out) < num_held_out:
        entry = next(entries)
        held_out.setdefault(entry["question"], entry)
    train = list(islice((entry for entry in entries if entry["question"] not in held_out), num_train))
    assert held_out.keys().isdisjoint(entry["question"] for entry in train), "what is held out is not trained"
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("validation", held_out.values()), ("train", train)):
        lines = (json.dumps(_row(entry)) + "\n" for entry in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    question = {"role": "user", "content": entry["question"]}
    return {"messages": [question], "answer": entry["answer"], "metadata": entry["metadata"]}
