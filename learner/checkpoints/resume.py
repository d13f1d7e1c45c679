"""Resuming and forking: which checkpoint a name means, the settings it was made with, and a new run made from it.

Torch-free, so that the command line can check before anything starts. Blocks on the disk only.

A fork is a new run that begins with another run's checkpoint: `streamrl up FILE name=NEW --fork RUN@STEP`, or `learn`.

The new folder holds one checkpoint, with the weights, optimizer state and step of the old one, and is from then on a
run like any other, with its own uid, terms, streams and versions. It may differ from the old run in every setting that
the weights fit. Its data continue where the old run's stopped: those tickets count here as dropped, since this run has
not trained them. Or the data start afresh, and with them the learning rate schedule.

It is a command and not a setting, since it happens once, while a configuration holds at every start. The folder appears
complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from streamrl.config import schema
from streamrl.config.changes import Change, changes, check_changes
from streamrl.config.load import config_from_json, load_config
from streamrl.errors import ConfigError, DataError
from streamrl.files import fsync_folder
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState, best_first
from streamrl.learner.checkpoints.scores import BEST_METRIC
from streamrl.learner.checkpoints.sealed import MANIFEST, Files, unseal
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry, claim_run, highest_term
from streamrl.learner.groups.ledger import DROPPED, Ending, FeedState, Ledger

ANY_DATA = "any"  # data fingerprint of a fork that starts its data afresh
CONFIG = "config.yaml"  # the settings of the last learner that took the run (`admission.claim`)
REPLAY = "replay.json"  # in a replay's run folder: identifies its recording
_FORKED_FROM = "forked_from"  # in the checkpoint that a fork begins with

log = structlog.get_logger(__name__)


def check_resume(config: schema.Config) -> None:
    """Raise ConfigError if checkpoints exist and `checkpoint.resume` forbids resuming.

    Called once by whoever starts a learner; ranks restarted by torchrun must resume.
    """
    if not config.checkpoint.resume and CheckpointRoot(config.folder).names(ancestry(config.folder)):
        raise ConfigError(
            f"checkpoint.resume = false, but {config.folder} holds checkpoints: set another name, or let it resume"
        )


def settings_to_compare(config: schema.Config) -> dict[str, Any]:
    """What a checkpoint keeps of the settings that it was made with, for `changed_since_checkpoint`."""
    return {"config": config.model_dump(mode="json"), "working_directory": str(Path.cwd())}


def changed_since_checkpoint(config: schema.Config) -> list[Change]:
    """Settings that changed since the newest checkpoint; empty if there is none, or it holds no configuration.

    ConfigError for changes that a run may not make half-way, which it is also before its own first checkpoint.
    """
    newest = _newest(config)
    before = config_of(newest) if newest is not None else None
    if newest is None or before is None:
        _check_since_start(config, newest)
        return []
    found = changes(before, config, working_directory=newest.state.extra.get("working_directory", ""))
    check_changes(found, folder=str(config.folder))
    return found


def _newest(config: schema.Config) -> Checkpoint | None:
    root, lineage = CheckpointRoot(config.folder), ancestry(config.folder)
    return root.newest_complete(lineage, digests=False) if root.names(lineage) else None


def _check_since_start(config: schema.Config, newest: Checkpoint | None) -> None:
    """Compare with the settings of the last learner that took the run, if that was after this checkpoint.

    What its workers have made is in Redis, and is trained by the next learner.
    """
    path = config.folder / CONFIG
    if (config.folder / REPLAY).exists():  # its groups are the recording's, whatever a start before asked for
        return
    if highest_term(config.folder) <= (0 if newest is None else newest.name.term) or not path.is_file():
        return
    try:
        before = load_config(path).config
    except ConfigError as error:
        log.warning("settings of the last start cannot be compared", file=str(path), reason=str(error))
        return
    check_changes(changes(before, config), folder=str(config.folder), has_checkpoint=newest is not None)


def config_of(checkpoint: Checkpoint) -> schema.Config | None:
    """The configuration that the checkpoint was made with; None if missing or of an incompatible version."""
    saved = checkpoint.state.extra.get("config")
    if saved is None:
        return None
    try:
        return config_from_json(json.dumps(saved))
    except ConfigError as error:
        log.warning("settings of the checkpoint cannot be compared", checkpoint=str(checkpoint.name), reason=str(error))
        return None


def find_checkpoint(text: str, *, digests: bool = True) -> Checkpoint:
    """Resolve `RUN_FOLDER` (the newest), `RUN_FOLDER@STEP`, `RUN_FOLDER@best`, or a checkpoint's own folder.

    Checking digests reads every file, which takes so long that a live run may have removed the checkpoint by then.
    """
    path = Path(text)
    if (name := CheckpointName.parse(path.name)) is not None and path.is_dir():
        return CheckpointRoot(path.parent.parent).open(name, digests=digests)
    place, _, which = text.rpartition("@") if "@" in text and not path.is_dir() else (text, "", "")
    folder = Path(place)
    if not (folder / "checkpoints").is_dir():
        raise DataError(f"{text}: there is no {folder / 'checkpoints'}; name the folder of a run")
    root, lineage = CheckpointRoot(folder), ancestry(folder)
    if not which:
        newest = root.newest_complete(lineage, digests=digests)
        if newest is None:
            raise DataError(f"{text}: the run has made no checkpoint yet")
        return newest
    names = root.names(lineage)
    if which == "best":
        available = list(root.readable(lineage))  # newest first; a live run may remove one meanwhile
        config = config_of(available[0]) if available else None
        metric = BEST_METRIC if config is None else config.checkpoint.best_by
        scored = best_first(available, metric)
        if not scored:
            raise DataError(
                f"{text}: no checkpoint of the run has been validated ({metric}, checkpoint.best_by); validations with "
                "too few answers or samples do not count (val_rollouts/ranks; the learner's log says what failed)"
            )
        return root.open(scored[0].name, digests=digests)
    found = next((name for name in names if str(name.step) == which), None)
    if found is None:
        steps = ", ".join(str(name.step) for name in reversed(names)) or "none"
        raise DataError(f"{text}: the run has no checkpoint of step {which}; it has {steps}; @best names the best one")
    return root.open(found, digests=digests)


OUTCOME = f"{DROPPED}before_fork"


def check_steps(source: Checkpoint, training: schema.Training) -> None:
    """Raise ConfigError if no step is left for the fork, which continues the source's count."""
    made = source.state.step
    if 0 <= training.max_steps <= made:
        raise ConfigError(
            f"training.max_steps = {training.max_steps}: {source.folder} is at step {made}, and a fork continues "
            f"its count; set it to {made + training.max_steps} for as many further steps, or to -1 for all of the data"
        )


def check_model(source: Checkpoint, config: schema.Config) -> None:
    """Raise ConfigError if the fork would train other weights than the source has: other adapters, or other layers."""
    before = config_of(source)
    for change in () if before is None else changes(before, config):
        trained = change.key == "model.router" or change.key.startswith("model.lora")
        if trained and change.key != "model.lora.dropout":
            raise ConfigError(
                f"{change}: {source.folder} holds the weights that the former trains; keep it, or begin with its "
                "export (`streamrl weights export`) as model.path"
            )


def check_data_left(config: schema.Config, *, num_places: int) -> None:
    """Raise ConfigError if the run has just been forked from one that had used up its data; `num_places` of them."""
    newest = _newest(config)
    if newest is None or _FORKED_FROM not in newest.state.extra:
        return
    ended, source = newest.state.stream.ledger, newest.state.extra[_FORKED_FROM]["checkpoint"]
    if ended.issued >= num_places + len(ended.retries) and not Ledger(ended).outstanding:
        raise ConfigError(
            f"training.max_epochs = {config.training.max_epochs}: {source}, with which this run begins, has used up "
            "the data; raise it for further passes and start the run again without --fork, or start another one that "
            f"begins the data anew, with `name=NEW --fork {source} --new-data`"
        )


def check_same_data(config: schema.Config, fingerprint: str) -> None:
    """Raise DataError if the run's newest checkpoint was made with prompts of another fingerprint."""
    newest = _newest(config)
    if newest is not None and newest.state.data_fingerprint not in (ANY_DATA, fingerprint):
        train = ", ".join(repr(one.dataset.place) for one in config.data.train_sets())
        raise DataError(
            f"{newest.folder} was made with other prompts, seed or order than data.train = {train} gives now: tickets "
            "would mean other prompts; set them back, or start another run from it with "
            f"name=NEW --fork {newest.folder} --new-data"
        )


def fork(source: Checkpoint, folder: Path, *, new_data: bool) -> Checkpoint:
    """Create the new run's folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} exists already: give the fork its own name, with name=NEW, or leave out --fork to continue it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".tmp-fork-{folder.name}-{uuid.uuid4().hex[:12]}")
    try:
        made = _make(source, temporary, new_data=new_data)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_folder(folder.parent)
    return CheckpointRoot(folder).open(made.name)


def _make(source: Checkpoint, temporary: Path, *, new_data: bool) -> Checkpoint:
    root = CheckpointRoot(temporary)
    run_uid = claim_run(temporary)
    term = root.claim_term(run_uid)
    name = CheckpointName(term.number, source.state.step)
    target = root.new_folder(name)
    files = _take_files(source.folder, target)
    state = CheckpointState(
        run_uid=run_uid,
        step=source.state.step,
        stream=FeedState() if new_data else _state_after(source.state.stream, step=source.state.step),
        data_fingerprint=ANY_DATA if new_data else source.state.data_fingerprint,
        extra={
            "consumed_samples": source.state.extra.get("consumed_samples", 0),
            "first_step": source.state.step if new_data else source.state.extra.get("first_step", 0),
            _FORKED_FROM: {"checkpoint": str(source.folder), "run_uid": source.state.run_uid},
        },
    )
    made = root.commit(name, state)
    for path, taken in unseal(made.folder / MANIFEST)["files"].items():
        if taken != files[path]:
            raise DataError(
                f"{source.folder / path}: contents do not match their digest; fork from another checkpoint, with @STEP"
            )
    return made


def _take_files(source: Path, target: Path) -> Files:
    """Link or copy the files of a checkpoint; return what its manifest says of them."""
    try:
        files: Files = unseal(source / MANIFEST)["files"]
        for path in files:
            _link(source / path, target / path)
    except (FileNotFoundError, DataError) as error:
        if isinstance(error, DataError) and (source / MANIFEST).exists():
            raise
        raise DataError(f"{source}: its run has removed it meanwhile, since it has newer ones: try again") from None
    return files


def _state_after(stream: FeedState, *, step: int) -> FeedState:
    """The stream's state after the source's: tickets that ended there count as dropped, open ones will be issued."""
    before = stream.ledger
    ended = Ledger(before)
    still_open = set(ended.open_tickets())
    endings = tuple(Ending(step, OUTCOME, number) for number in range(before.issued) if number not in still_open)
    begins = dict.fromkeys(sorted(still_open), step)
    ledger = replace(
        before, outcomes={OUTCOME: len(endings)}, ignored={}, attempts={}, begins=begins, asked={}, letters={}
    )
    return FeedState(ledger=ledger, curriculum=stream.curriculum, uncommitted=endings)


def _link(source: Path, target: Path) -> None:
    """Hard-link if possible: checkpoint files never change, so two runs may share them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
