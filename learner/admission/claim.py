"""Claims the run's folder: the next term, and the checkpoint that it resumes from.

Blocks on the disk; a full one is retried for as long as the caller says.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.errors import ResourceError
from streamrl.files import write_durably
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from streamrl.learner.checkpoints.resume import (
    CONFIG,
    changed_since_checkpoint,
    check_data_left,
    check_same_data,
)
from streamrl.learner.checkpoints.terms import Term, claim_run
from streamrl.learner.groups.prompts import PromptSet

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_EVERY_S = 1.0
_DISK_PATIENCE_S = 20.0  # with a file system that fails, as a network's does now and then

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run folder whose newest term belongs to this learner."""

    term: Term
    checkpoint: Checkpoint | None  # to resume from


def claim_folder(
    config: schema.Config,
    prompts: PromptSet,
    *,
    confirm: Callable[[], object] = lambda: None,
    known: Callable[[str], int] = lambda run_uid: 0,
) -> Claimed:
    """Claim the next term in the run's folder, after the one that is `known` elsewhere.

    The caller ensures that nobody else works in this folder; `confirm` raises if that no longer holds.
    """
    root = CheckpointRoot(config.folder)
    run_uid = claim_run(config.folder)
    # Before the claim, so that a refusal leaves no trace.
    changed = changed_since_checkpoint(config)
    check_data_left(config, num_places=prompts.num_places(config.training.max_epochs))
    check_same_data(config, prompts.fingerprint())
    term = root.claim_term(run_uid, confirm=confirm, known=known(run_uid))
    if changed:
        log.warning("settings changed since the checkpoint", changes=[str(change) for change in changed])
    checkpoint = root.open(term.parent) if term.parent else None
    write_durably(config.folder / CONFIG, dump_config(config).encode())
    return Claimed(term=term, checkpoint=checkpoint)


def once_there_is_room(
    claim: Callable[[], Claimed],
    *,
    patience_s: float,
    check: Callable[[], None],  # raises when waiting is pointless
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Claimed:
    """Run `claim`, and retry while the disk is full, and more briefly while it fails; torchrun's restarts are limited,
    so they are not used up here."""
    began = clock()
    while True:
        check()
        try:
            return claim()
        except OSError as error:
            is_full, waited_s = error.errno in _FULL, clock() - began
            if is_full and waited_s > patience_s:
                raise
            if not is_full and waited_s > min(patience_s, _DISK_PATIENCE_S):
                raise ResourceError(
                    f"{error.filename or 'the folder of the run'}: {error.strerror} (errno {error.errno}), for "
                    f"{waited_s:.0f} s: where the run stands cannot be known, and it does not resume from an older "
                    "checkpoint instead; see to that disk or network, then start the run again"
                ) from error
            log.warning("no disk space to start" if is_full else "the disk fails, trying again", error=str(error))
        sleep(_ROOM_EVERY_S * random.uniform(0.5, 1.0))
