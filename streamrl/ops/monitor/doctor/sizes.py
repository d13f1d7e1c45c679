"""Sizes of a run's model, from the headers of its safetensors files: nothing is loaded, and no code of a model runs.

0 means that the model is not here, or not in such files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.safetensors_header import LENGTH_BYTES, header_bytes, parse_header

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def count_parameters(folder: Path) -> int:
    return sum(prod(shape) for _, shape in _shapes(folder))


def trained_parameters(config: Config) -> int:
    """Count all parameters, or those of the adapters: two thin matrices for each adapted one."""
    folder, lora = Path(config.model.path), config.model.lora
    if lora is None:
        return count_parameters(folder)
    adapted = [shape for name, shape in _shapes(folder) if name.rpartition(".")[0].endswith(lora.targets)]
    return sum(lora.rank * sum(shape) for shape in adapted if len(shape) == 2)


def served_bytes(config: Config) -> int:
    """Size of the model as it is served."""
    return count_parameters(Path(config.model.path)) * BYTES[config.weights.dtype]


def published_bytes(config: Config) -> int:
    """Size of what is trained, as it is published: with adapters, only these."""
    return trained_parameters(config) * BYTES[config.weights.dtype]


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in _weight_files(folder):
        yield from _shapes_in(file)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: some releases hold the same weights a second time, for other programs."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return [folder / name for name in sorted({*index["weight_map"].values()}) if (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))


def _shapes_in(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        try:
            entries = parse_header(stream.read(header_bytes(stream.read(LENGTH_BYTES))))
        except (ValueError, KeyError, TypeError):
            return
    for name, entry in entries.items():
        yield name, entry.shape
