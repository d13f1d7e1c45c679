"""The model's folder: its parts agree with each other, and how large it is.

Read from headers and JSON alone; no tensor is loaded, and no code of a model runs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from streamrl.config.load import Loaded
from streamrl.ops.monitor.doctor.finding import Finding, error, ok, warning

_MAX_HEADER_BYTES = 100 << 20


def check_models(loaded: Loaded) -> Iterator[Finding]:
    config = loaded.config
    yield from _check_model("model", config.model.path, needs_end=True)
    if config.reward_server is not None:
        yield from _check_model("reward model", config.reward_server.model, needs_end=False)


def _check_model(name: str, path: str, *, needs_end: bool) -> Iterator[Finding]:
    folder = Path(path)
    if not folder.is_dir():
        yield warning(name, f"{path} is not a folder here: a hub's name is not looked at", "give a local folder")
        return
    settings = _read_json(folder / "config.json")
    settings = settings.get("text_config", settings)
    count = count_parameters(folder)
    told = f"{count / 1e6:,.1f} million parameters" if count else "no safetensors to count parameters in"
    yield ok(name, f"{settings.get('model_type', 'unknown type')}, {told}")
    yield from _check_vocabulary(name, folder, settings, needs_end=needs_end)


def _check_vocabulary(name: str, folder: Path, settings: dict[str, Any], *, needs_end: bool) -> Iterator[Finding]:
    tokenizer, outputs = _read_json(folder / "tokenizer.json"), settings.get("vocab_size")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece[0]: at for at, piece in enumerate(vocabulary)}
    ids = {**pieces, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}}
    if not ids or not isinstance(outputs, int):
        yield warning(f"{name} vocabulary", "no tokenizer.json to compare with", "the learner compares when it starts")
        return
    highest = max(ids.values())
    if highest >= outputs:
        yield error(
            f"{name} vocabulary",
            f"the tokenizer has ids up to {highest}, the model only {outputs} outputs",
            "model and tokenizer are of different models, or tokens were added without resizing the model",
        )
        return
    yield ok(f"{name} vocabulary", f"{len(ids)} tokens, {outputs} outputs")
    end = _read_json(folder / "tokenizer_config.json").get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if needs_end and end is not None and end not in ids:
        yield error(f"{name} end token", f"eos_token {end!r} is not in the vocabulary", "mend tokenizer_config.json")


def count_parameters(folder: Path) -> int:
    """By the headers of its safetensors files; 0 where there are none."""
    return sum(_count(file) for file in sorted(folder.glob("*.safetensors")))


def _count(file: Path) -> int:
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES
        if length >= _MAX_HEADER_BYTES:
            return 0
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return 0
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _read_json(file: Path) -> dict[str, Any]:
    """Nothing where it is not there or no JSON object; what must be there is `check_files`'s to say."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
