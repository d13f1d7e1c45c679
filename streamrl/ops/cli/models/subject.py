"""The weights that a command is about: `RUN`, `RUN@STEP`, `RUN@best`, a checkpoint's folder, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.config.files import why_not_on_hub
from streamrl.errors import ConfigError, DataError
from streamrl.ops.monitor.remains import read_remains

if TYPE_CHECKING:
    from streamrl.config.schema import Config
    from streamrl.learner.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    name: str  # for display
    checkpoint: Checkpoint | None  # None: the model of this name
    config_file: Path  # its run's; may not exist
    base: str | None = None  # the checkpoint's base model, where it is now; None: the run's model.path


takes_base = click.option(
    "--model", metavar="MODEL", help="The base model's folder or hub name, if it has moved; default: the run's."
)


def find_subject(text: str, *, exported: bool = False, base: str | None = None) -> Subject:
    """Find the weights of this name, or raise DataError.

    A run stands for its newest checkpoint or, with `exported`, for its export if that has its newest weights.
    """
    from streamrl.learner.checkpoints.resume import find_checkpoint

    if exported and (export := Path(text) / "export").is_dir() and not _goes_on(Path(text)):
        text = str(export)
    if _is_model(text):
        if base is not None:
            raise of_whole_model(text, f"--model {base}")
        # for runs/mine/export, the run's
        return Subject(name=text, checkpoint=None, config_file=Path(text).parent / "config.yaml")
    place = text.rpartition("@")[0] or text
    if not Path(text).exists() and not Path(place).exists():
        raise DataError(
            f"{text}: there is no folder {place}, and {why_not_on_hub(place)}; name a run (RUN, RUN@STEP or RUN@best), "
            "a model's folder, or a model on a hub"
        )
    found = find_checkpoint(text)
    config_file = found.folder.parent.parent / "config.yaml"
    return Subject(name=f"{text} (step {found.state.step})", checkpoint=found, config_file=config_file, base=base)


def of_whole_model(name: str, setting: str) -> ConfigError:
    """Return the error of a setting that names a checkpoint's base model."""
    return ConfigError(f"{setting}: does not apply to {name}, which is a whole model; leave it out")


def settings_of(subject: Subject) -> Config:
    """The settings that the checkpoint was made with, on its base model; DataError if it has none that can be read."""
    from streamrl.learner.checkpoints.resume import config_of

    assert subject.checkpoint is not None, "only called for a checkpoint"
    config = config_of(subject.checkpoint)
    if config is not None:
        moved = {} if subject.base is None else {"path": subject.base}
        return config.model_copy(update={"model": config.model.model_copy(update=moved)})
    extra = subject.checkpoint.state.extra
    if "config" not in extra and "forked_from" in extra:
        raise DataError(
            f"{subject.name} is what a fork begins with, and has no settings of its own; its weights are those of "
            f"{extra['forked_from']['checkpoint']}: name that, or a later checkpoint of the fork"
        )
    raise DataError(f"{subject.name} was made by another version of streamrl, and this one cannot read its settings")


def checkpoints_of(text: str) -> list[str]:
    """Expand `RUN@all` to the checkpoints that the run keeps, oldest first; return other names unchanged."""
    place, _, which = text.rpartition("@")
    if which != "all" or Path(text).is_dir():
        return [text]
    from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
    from streamrl.learner.checkpoints.terms import ancestry

    names = CheckpointRoot(Path(place)).names(ancestry(Path(place))) if Path(place).is_dir() else []
    if not names:
        raise DataError(f"{text}: the run keeps no checkpoint")
    return [f"{place}@{name.step}" for name in reversed(names)]


def _goes_on(run: Path) -> bool:
    """Whether the run has been continued since its export, which stays until it finishes again."""
    try:
        remains = read_remains(run)
    except ConfigError:  # a folder of supervised training
        return False
    return remains.recorded.get("state", "finished") != "finished" and any((run / "checkpoints").glob("*"))


def _is_model(text: str) -> bool:
    path = Path(text)
    if path.is_dir():
        return (path / "config.json").is_file()
    return text.count("/") == 1 and "@" not in text and not path.exists() and not path.parent.exists()
