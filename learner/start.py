"""Rank 0's way to becoming the run's learner, and the `Start` that it broadcasts to the other ranks.

    lease ─► durable term ─► checkpoint to resume from ─► claim in Redis ─► Start, broadcast as JSON

The lease comes first, so that a learner that is not admitted leaves no trace; it is then given back. Blocks on the
lease (at most twice its length), on Redis and on the disk; a full disk is retried for `redis.give_up_after_s`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice

import redis
import structlog
from pydantic import TypeAdapter

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.errors import ConfigError, DataError, ResourceError, RunGone, TransportError, UserError
from streamrl.files import write_durably
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from streamrl.learner.checkpoints.resume import ANY_DATA, changed_since_checkpoint
from streamrl.learner.checkpoints.terms import CheckpointName, Lineage, Term, ancestry, claim_run, known_run
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease, free_lease, known_term
from streamrl.versions import term_of

REPLAY = "replay.json"  # in a replay's run folder: identifies its recording
_CANARY_TOKENS = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_EVERY_S = 1.0
_DISK_PATIENCE_S = 20.0  # with a file system that fails, as a network's does now and then
_FREE_PATIENCE_S = 2.0  # an unfreed lease ends by itself
_NO_RUN_IDS = ("", "none")  # what torchrun sets when no run id was given

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The Redis server that holds the run's stream, and this learner's identity towards it."""

    client: redis.Redis
    keys: Keys
    holder: str
    takeover: bool = False  # replace a learner that holds the run
    standby: bool = False  # wait until that learner ends, without a limit
    began: float  # `time.monotonic` at the first start of this learner's ranks

    def stream(self, config: schema.Config, *, run_uid: str, term: int) -> LearnerStream:
        return LearnerStream(
            self.client,
            self.keys,
            run_uid=run_uid,
            term=term,
            holder=self.holder,
            lease_s=config.learner.lease_s,
            give_up_after_s=config.redis.give_up_after_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What every rank must know before the first step."""

    run_uid: str
    term: int
    checkpoint: CheckpointName | None  # to resume from
    lineage: Mapping[int, int | None]  # ancestor terms, each with its last valid step; None: every step
    step: int  # optimizer steps made
    first_step: int  # at which the data began; a fork with new data continues its source's step count
    consumed_samples: int
    total_steps: int  # upper bound, counted from first_step
    steps_of_data: int  # what the data suffice for if every group is trained
    canary_ids: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Start:
        return TypeAdapter(Start).validate_json(data)

    def position(self, step: int, *, num_batches: float) -> float:
        """How far this step is on the way to the end of the run, on a scale from 0 to `total_steps`.

        The data end a run, at `num_batches` = `steps_of_data`, or `training.max_steps` if that comes first. Dropped
        groups use up data without a step, so counting steps alone would not show the first.
        """
        by_data = num_batches * self.total_steps / self.steps_of_data
        return by_data if self.total_steps == self.steps_of_data else max(by_data, step - self.first_step)

    def is_dead(self, version: int, step: int) -> bool:
        """Whether this version, made at this optimizer step, belongs to an abandoned lineage."""
        return not Lineage(self.lineage).holds(CheckpointName(term_of(version), step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run folder whose newest term belongs to this learner."""

    term: Term
    checkpoint: Checkpoint | None  # to resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What rank 0 holds once it is the run's learner."""

    start: Start
    stream: LearnerStream
    checkpoint: Checkpoint | None


def holder_name(environment: Mapping[str, str]) -> str:
    """The lease holder's name: stable across restarts by one torchrun, so that they take over at once."""
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{os.getppid()}" if run_id in _NO_RUN_IDS else run_id


def was_restarted(environment: Mapping[str, str]) -> bool:
    """Whether torchrun restarted the ranks on this machine; machines that join, leave or restart do not count."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def admit(
    *, config: schema.Config, server: Server, keeper: LeaseKeeper, prompts: PromptSet, fingerprint: str
) -> Admitted:
    """Claim the term and the run; the caller already holds the lease (`take_lease`).

    Raises RunGone if the run was removed, unless `takeover`, which starts it afresh. An operator's stop applies to
    learners that had started by then, and to their restarts. `fingerprint` identifies model and tokenizer.
    """
    if (config.folder / REPLAY).exists():
        raise ConfigError(f"{config.folder} is the replay of a recording: continue it with --replay")
    # Check again: loading may have taken longer than the lease, and another learner may have been waiting for it to
    # expire.
    still_ours = partial(
        await_lease,
        server.client,
        server.keys,
        run_uid=partial(known_run, config.folder),
        holder=server.holder,
        lease_s=config.learner.lease_s,
        wait_s=0.0,
    )
    give_up_after_s = config.redis.give_up_after_s
    known = partial(known_term, server.client, server.keys, takeover=server.takeover, give_up_after_s=give_up_after_s)
    claim = partial(claim_folder, config, prompts, confirm=still_ours, known=known)
    claimed = once_there_is_room(claim, patience_s=give_up_after_s, check=keeper.check)
    stream = server.stream(config, run_uid=claimed.term.run_uid, term=claimed.term.number)
    stream.claim(
        config_json=config.model_dump_json(),
        fingerprint=fingerprint,
        takeover=server.takeover,
        wait_s=config.learner.lease_s,
    )
    keeper.renew_with(stream.renew)
    stream.forget_end(began=server.began)
    log.info(
        "learner of the run",
        run_uid=claimed.term.run_uid,
        term=claimed.term.number,
        checkpoint=str(claimed.term.parent),
        computes_in=config.model.dtype,
        served_in=config.weights.dtype,
    )
    lineage = ancestry(config.folder).last_steps
    start = make_start(config, claimed, prompts, lineage=lineage, canary_ids=_canary_ids(prompts))
    return Admitted(start=start, stream=stream, checkpoint=claimed.checkpoint)


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
    changed = changed_since_checkpoint(config)  # before the claim, so that a refusal leaves no trace
    term = root.claim_term(run_uid, confirm=confirm, known=known(run_uid))
    if changed:
        log.warning("settings changed since the checkpoint", changes=[str(change) for change in changed])
    checkpoint = root.open(term.parent) if term.parent else None
    if checkpoint is not None and checkpoint.state.data_fingerprint not in (ANY_DATA, prompts.fingerprint()):
        raise DataError(
            f"{checkpoint.folder} was made with other prompts, seed or order than data.train = {_paths(config.data)} "
            "gives now: tickets would mean other prompts; set them back, or start another run from it with "
            f"name=NEW --fork {checkpoint.folder} --new-data"
        )
    write_durably(config.folder / "config.yaml", dump_config(config).encode())
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


def make_start(
    config: schema.Config,
    claimed: Claimed,
    prompts: PromptSet,
    *,
    lineage: Mapping[int, int | None],
    canary_ids: tuple[int, ...],
) -> Start:
    checkpoint = claimed.checkpoint
    extra = checkpoint.state.extra if checkpoint else {}
    first_step = extra.get("first_step", 0)
    steps_of_data = -(-prompts.num_places(config.training.max_epochs) // config.training.groups_per_step)
    return Start(
        run_uid=claimed.term.run_uid,
        term=claimed.term.number,
        checkpoint=checkpoint.name if checkpoint else None,
        lineage=lineage,
        step=checkpoint.state.step if checkpoint else 0,
        first_step=first_step,
        consumed_samples=extra.get("consumed_samples", 0),
        total_steps=_total_steps(config.training, steps_of_data, first_step),
        steps_of_data=steps_of_data,
        canary_ids=canary_ids,
    )


def take_lease(
    config: schema.Config,
    server: Server,
    *,
    takeover: bool = False,
    standby: bool = False,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Wait for the lease, at most twice its length, and return whether this learner got it.

    By then a holder that stopped renewing has lost the lease, and one that still renews must not be disturbed. A
    `standby` waits for as long as `go_on` returns True.
    """
    return await_lease(
        server.client,
        server.keys,
        run_uid=partial(known_run, config.folder),
        holder=server.holder,
        lease_s=config.learner.lease_s,
        wait_s=math.inf if standby else 2 * config.learner.lease_s,
        takeover=takeover,
        began=server.began,
        give_up_after_s=config.redis.give_up_after_s,
        go_on=go_on,
    )


@contextmanager
def holding_lease(config: schema.Config, server: Server) -> Iterator[LeaseKeeper]:
    """Renew the lease while the block lasts. After an error that no restart can fix it is given back."""
    keeper = LeaseKeeper(partial(take_lease, config, server), lease_s=config.learner.lease_s)
    try:
        with keeper.keeping():
            yield keeper
    except (UserError, RunGone):
        # After the last renewal, which would take it again.
        with suppress(TransportError):
            free_lease(server.client, server.keys, holder=server.holder, give_up_after_s=_FREE_PATIENCE_S)
        raise


def _paths(data: schema.Data) -> str:
    return ", ".join(repr(one.dataset.place) for one in data.train_sets())


def _total_steps(training: schema.Training, steps_of_data: int, first_step: int) -> int:
    return steps_of_data if training.max_steps < 0 else min(steps_of_data, training.max_steps - first_step)


def _canary_ids(prompts: PromptSet) -> tuple[int, ...]:
    """The first tokens of the concatenated prompts, so that the canary sees realistic input."""
    tokens = (int(token) for row in prompts.rows for token in row.token_ids)
    return tuple(islice(tokens, _CANARY_TOKENS))
