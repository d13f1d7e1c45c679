"""What the demo needs before its run: the model, which is kept between runs, and data, which the seed decides.

The demo as a demonstration: what it says, how its answers are judged, how it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.config.schema import Config
from streamrl.demos import pretrained_model as model
from streamrl.demos import sums
from streamrl.demos.pretrained_model import NAME
from streamrl.demos.report import Task
from streamrl.demos.run import Showcase, as_overrides, write_rows
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
    return as_overrides({key: str(path) for key, path in settings.items()})


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
    write_rows(folder / "validation.jsonl", map(_row, held_out.values()))
    write_rows(folder / "train.jsonl", map(_row, train))


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    question = {"role": "user", "content": entry["question"]}
    return {"messages": [question], "answer": entry["answer"], "metadata": entry["metadata"]}


TASK = Task(
    source="right",
    question=lambda _, fields: f"{fields['metadata']['expression']} =",
    is_right=sums.is_right,
    prepared="model and data",
)
DEMO = Showcase(
    name="demo",
    explanation=(
        "Task: sums of two numbers up to 100, asked and judged by reasoning-gym.",
        f"The model, {NAME}, rambles: one in five is right. Now rewards.",
    ),
    task=TASK,
    check=check,
    prepare=prepare,
)
