"""A new run that begins with a checkpoint of another one: `streamrl learn FILE name=NEW --fork RUN@STEP`.

The new folder holds one checkpoint, with the weights, the optimizer's state and the step of the old one, and is from
then on a run like any other: its own uid, epochs, streams and versions. It may differ from the old run in every setting
that the weights fit. Its data go on behind what the old run had come to: those tickets end here as dropped, for this
run has not trained them; or the data begin anew, and with them the schedule of the learning rate.

A command, and not a setting: it happens once, and a configuration says what holds at every start. The folder appears
whole or not at all. Torch-free; blocks on the disk, for the files where they cannot be linked.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from learner.checkpoints.checkpoint import MANIFEST, Checkpoint, CheckpointRoot, CheckpointState
from learner.checkpoints.epochs import CheckpointName, claim_run
from learner.checkpoints.resume import ANY_DATA
from learner.checkpoints.scores import SCORE
from learner.stream.ledger import DROPPED, Ending, Ledger, LedgerState, StreamState
from streamrl.config import schema
from streamrl.durable import fsync_folder
from streamrl.errors import ConfigError

OUTCOME = f"{DROPPED}before_fork"


def check_steps(source: Checkpoint, training: schema.Training) -> None:
    """ConfigError when no step is left to the new run, which goes on counting."""
    made = source.state.step
    if 0 <= training.max_steps <= made:
        raise ConfigError(
            f"training.max_steps = {training.max_steps}: {source.folder} is of step {made}, and a fork counts on from "
            f"there; set it to {made + training.max_steps} for as many steps more, or to -1 for all of the data"
        )


def fork(source: Checkpoint, folder: Path, *, new_data: bool) -> Checkpoint:
    """Make the new run's folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already: give the fork a name of its own, as name=NEW")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".tmp-fork-{folder.name}-{uuid.uuid4().hex[:12]}")
    try:
        made = _make(source, aside, new_data=new_data)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    fsync_folder(folder.parent)
    return CheckpointRoot(folder).open(made.name)


def _make(source: Checkpoint, aside: Path, *, new_data: bool) -> Checkpoint:
    root = CheckpointRoot(aside)
    run_uid = claim_run(aside)
    epoch = root.claim_epoch(run_uid)
    name = CheckpointName(epoch.number, source.state.step)
    target = root.new_folder(name)
    for path in sorted(source.folder.rglob("*")):
        if path.is_file() and path.name not in (MANIFEST, SCORE):
            _link(path, target / path.relative_to(source.folder))
    state = CheckpointState(
        run_uid=run_uid,
        step=source.state.step,
        stream=StreamState() if new_data else _behind(source.state.stream.ledger, step=source.state.step),
        data_fingerprint=ANY_DATA if new_data else source.state.data_fingerprint,
        extra={
            "consumed_samples": source.state.extra.get("consumed_samples", 0),
            "first_step": source.state.step if new_data else source.state.extra.get("first_step", 0),
            "forked_from": {"checkpoint": str(source.folder), "run_uid": source.state.run_uid},
        },
    )
    return root.commit(name, state)


def _behind(before: LedgerState, *, step: int) -> StreamState:
    """Everything that had ended there has ended here; what was open is to be asked for."""
    ended = Ledger(before)
    still_open = set(ended.open_tickets())
    endings = tuple(Ending(step, OUTCOME, number) for number in range(before.issued) if number not in still_open)
    ledger = LedgerState(
        issued=before.issued,
        watermark=before.watermark,
        exceptions=before.exceptions,
        outcomes={OUTCOME: len(endings)},
        retries=before.retries,
        begins=dict.fromkeys(sorted(still_open), step),
    )
    return StreamState(ledger=ledger, uncommitted=endings)


def _link(source: Path, target: Path) -> None:
    """Files of checkpoints never change, so two runs may share one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
