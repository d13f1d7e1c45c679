"""Writes a checkpoint as a model's folder. Importing this requires torch and transformers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from streamrl.learner.checkpoints.export import write_model
from streamrl.ops.cli.subject import Subject, settings_of


def write_folder(subject: Subject, folder: Path) -> Path:
    """Create the folder, which must not exist; it appears complete or not at all."""
    assert subject.checkpoint is not None, "only called for a checkpoint"
    config = settings_of(subject)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as temporary:
        return write_model(config, Path(temporary), checkpoint=subject.checkpoint).rename(folder)
