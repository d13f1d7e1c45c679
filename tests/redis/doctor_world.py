"""A model, a configuration and what the doctor finds of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from streamrl.config.load import Loaded, load_config
from streamrl.finding import Finding
from streamrl.ops.monitor.doctor import look

TOKENS = ["<eos>", *"abcdefgh"]


def make_model(folder: Path) -> Path:
    """What a folder of a model says of itself; its tensors are never read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(TOKENS)}))
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    write_tensors(folder, rows=10)
    (folder.parent / "train.jsonl").write_text('{"text": "ab", "answer": "b"}\n')
    return folder


def write_tensors(folder: Path, *, rows: int) -> None:
    header = json.dumps(
        {"layer.w.weight": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, 4000 * rows]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def write_config(model: Path, url: str) -> str:
    path = model.parent / "run.yaml"
    path.write_text(
        f"""
model: {{path: {model}}}
data: {{train: {model.parent / "train.jsonl"}}}
dir: {model.parent}
redis: {{url: "{url}", max_backlog_bytes: 1000000}}
weights: {{max_store_bytes: 100000}}
rewards: {{exact: {{type: function, target: exact_match}}}}
validation: {{every_steps: 0, at_start: false, at_end: false}}
"""
    )
    return str(path)


def load(model: Path, url: str, *overrides: str) -> Loaded:
    return load_config(write_config(model, url), overrides)


def found(model: Path, url: str, *overrides: str) -> dict[str, Finding]:
    return {finding.name: finding for _, finding in look(load(model, url, *overrides))}
