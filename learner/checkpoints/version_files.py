"""Writes a published version in the layout of its model's files, from the file of a worker's mirror.

One tensor at a time is read and written (`hub_files`). Blocks on the disk.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from safetensors import safe_open

from streamrl.errors import DataError
from streamrl.learner.checkpoints.hub_files import HubFiles
from streamrl.learner.loading.build import build_model
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.parallel.dtensors import persistent_buffers


def write_version(weights: Path, folder: Path, *, model: Path) -> None:
    """Write the tensors in `weights` as `export` writes a learner's. DataError if the model has others."""
    transformers.utils.logging.disable_progress_bar()
    built = build_model(str(model), MASKED)
    parameters = dict(built.named_parameters())
    shapes = {name: list(tensor.shape) for name, tensor in (*parameters.items(), *persistent_buffers(built))}
    with safe_open(weights, framework="pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
        if differing := {name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name)}:
            raise DataError(f"{model} is not the model of this run: it differs in {min(differing)}")
        dtype = file.get_tensor(next(iter(parameters))).dtype
        with HubFiles(folder, built, dtype) as files:
            for name in found:
                files.take(name, file.get_tensor(name))
