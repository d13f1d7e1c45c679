"""Rank 0's way to becoming the run's learner, once it has the lease.

    lease ─► durable term ─► checkpoint to resume from ─► claim in Redis ─► Start

The lease comes first, so that a learner that is not admitted leaves no trace; it is then given back. Blocks on Redis
and on the disk; a full disk is retried for `redis.give_up_after_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice

import structlog

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.admission.claim import claim_folder, once_there_is_room
from streamrl.learner.admission.server import Server
from streamrl.learner.admission.start import Start, make_start
from streamrl.learner.checkpoints.checkpoint import Checkpoint
from streamrl.learner.checkpoints.resume import REPLAY
from streamrl.learner.checkpoints.terms import ancestry, known_run
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease, known_term

_CANARY_TOKENS = 64

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What rank 0 holds once it is the run's learner."""

    start: Start
    stream: LearnerStream
    checkpoint: Checkpoint | None


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


def _canary_ids(prompts: PromptSet) -> tuple[int, ...]:
    """The first tokens of the concatenated prompts, so that the canary sees realistic input."""
    tokens = (int(token) for row in prompts.rows for token in row.token_ids)
    return tuple(islice(tokens, _CANARY_TOKENS))
