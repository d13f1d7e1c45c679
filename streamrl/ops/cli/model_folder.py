"""Writes a checkpoint as a model's folder. Importing this requires torch and transformers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from streamrl.errors import DataError
from streamrl.learner.checkpoints.export import write_model
from streamrl.learner.checkpoints.resume import config_of
from streamrl.ops.cli.subject import Subject


def write_folder(subject: Subject, folder: Path) -> Path:
    """Create the folder, which must not exist; it appears complete or not at all."""
    assert subject.checkpoint is not None, "only called for a checkpoint"
    config = config_of(subject.checkpoint)
    if config is None:
        raise DataError(
            f"{subject.name} was made by another version of streamrl, and this one cannot read its settings"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as temporary:
        return write_model(config, Path(temporary), checkpoint=subject.checkpoint).rename(folder)
