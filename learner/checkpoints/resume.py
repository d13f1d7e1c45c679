"""What a run that goes on finds of itself: the checkpoint that people mean, and the settings that it was made with.

Torch-free, so that the command line can ask before anything starts. Blocks on the disk only.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from learner.checkpoints.epochs import CheckpointName, ancestry
from learner.checkpoints.scores import best_first
from streamrl.config import schema
from streamrl.config.changes import Change, changes
from streamrl.config.dump import config_from_json
from streamrl.errors import ConfigError, DataError

ANY_DATA = "any"  # as a checkpoint's fingerprint of the data: a fork that begins its data anew

log = structlog.get_logger(__name__)


def check_resume(config: schema.Config) -> None:
    """For whoever starts a learner, once: ranks that are started again by torchrun must go on. ConfigError where
    `checkpoint.resume` forbids that, and there are checkpoints."""
    if not config.checkpoint.resume and CheckpointRoot(config.folder).names(ancestry(config.folder)):
        raise ConfigError(
            f"checkpoint.resume = false, and {config.folder} holds checkpoints: set another name, or let it go on"
        )


def changed_since_checkpoint(config: schema.Config) -> list[Change]:
    """Against the newest checkpoint in the run's folder; none where there is none, or where it does not say."""
    root = CheckpointRoot(config.folder)
    lineage = ancestry(config.folder)
    if not root.names(lineage):
        return []
    newest = root.newest_complete(lineage, digests=False)
    before = config_of(newest) if newest is not None else None
    return changes(before, config) if before is not None else []


def config_of(checkpoint: Checkpoint) -> schema.Config | None:
    """The configuration it was made with; None when that was another version's, or is not there."""
    saved = checkpoint.state.extra.get("config")
    if saved is None:
        return None
    try:
        return config_from_json(json.dumps(saved))
    except ConfigError as error:
        log.warning("settings of the checkpoint cannot be compared", checkpoint=str(checkpoint.name), reason=str(error))
        return None


def find_checkpoint(text: str) -> Checkpoint:
    """`RUN_FOLDER` (the newest), `RUN_FOLDER@STEP`, `RUN_FOLDER@best`, or the folder of a checkpoint itself."""
    path = Path(text)
    if (name := CheckpointName.parse(path.name)) is not None and path.is_dir():
        return CheckpointRoot(path.parent.parent).open(name, digests=True)
    place, _, which = text.rpartition("@") if "@" in text and not path.is_dir() else (text, "", "")
    folder = Path(place)
    if not (folder / "checkpoints").is_dir():
        raise DataError(f"{text}: there is no {folder / 'checkpoints'}; name the folder of a run")
    root, lineage = CheckpointRoot(folder), ancestry(folder)
    if not which:
        newest = root.newest_complete(lineage)
        if newest is None:
            raise DataError(f"{text}: the run has made no checkpoint yet")
        return newest
    names = root.names(lineage)
    if which == "best":
        scored = best_first(root.open(name) for name in names)
        if not scored:
            raise DataError(f"{text}: no checkpoint of the run has been validated")
        return root.open(scored[0].name, digests=True)
    found = next((name for name in names if str(name.step) == which), None)
    if found is None:
        steps = ", ".join(str(name.step) for name in reversed(names)) or "none"
        raise DataError(f"{text}: the run keeps no checkpoint of step {which}; it has {steps}, or say @best")
    return root.open(found, digests=True)
