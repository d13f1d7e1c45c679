"""Finds a checkpoint's base model, and writes the checkpoint as a model's folder. Importing this requires torch and
transformers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from streamrl.config.files import model_problems
from streamrl.config.schema import Config
from streamrl.errors import DataError
from streamrl.learner.checkpoints.export import write_model
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.ops.cli.models.subject import Subject, settings_of


def settings_on_base(subject: Subject) -> Config:
    """The settings of the checkpoint; DataError with the remedy if its base model is not where they say."""
    config = settings_of(subject)
    path = config.model.path
    try:
        if problems := list(model_problems("model.path" if subject.base is None else "--model", path)):
            raise DataError(problems[0])
        read_tokenizer_info(path)
    except DataError as error:
        raise DataError(f"{error}; --model FOLDER names the base model of {subject.name}, wherever it is now") from None
    return config


def write_folder(subject: Subject, folder: Path) -> Path:
    """Create the folder, which must not exist; it appears complete or not at all."""
    assert subject.checkpoint is not None, "only called for a checkpoint"
    config = settings_on_base(subject)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as temporary:
        return write_model(config, Path(temporary), checkpoint=subject.checkpoint).rename(folder)
