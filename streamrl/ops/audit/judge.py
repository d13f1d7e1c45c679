"""The audit of one run: reads the evidence, evaluates it, and reports.

Commit and streams are read repeatedly until no commit was made in between. Then everything that had not ended in that
commit must be in the streams, because only commits trim them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis

from streamrl.errors import TransportError
from streamrl.ops.audit.books import AuditBooks, Mask
from streamrl.ops.audit.commit import LastCommit, read_commit
from streamrl.ops.audit.journal import read_chain, read_waste
from streamrl.ops.audit.streams import Streams, open_server, read_streams
from streamrl.protocol.transport.keys import Keys

WRONG = ("lost", "twice", "contradictory", "misanswered", "unproven")  # there must be none of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The fate of every training ticket of a run, as of its newest complete checkpoint.

    On a live run, what ended since that checkpoint is not committed, and counts as outstanding: a crash would undo it.
    A ticket that Redis has lost, or was too full to store, counts as lost until the learner reissues it.
    """

    run: str
    run_uid: str
    folder: str
    redis: str | None  # the server that was read; None: only the folder
    learner_is_live: bool  # the run's lease is held
    term: int  # of the newest learner
    checkpoint: str | None  # None: no commit yet
    step: int  # optimizer steps at that checkpoint

    issued: int  # tickets 0 .. issued - 1
    trained: int
    dropped: Mapping[str, int]  # by reason
    dead: int
    outstanding: int  # not ended, and present; `waiting` plus `delivered`, if Redis was read
    waiting: int  # outstanding tickets that wait for a worker, or are leased
    delivered: int  # outstanding tickets whose group waits for the learner

    lost: int  # ended nowhere in the surviving lineage, neither waiting nor delivered
    twice: int  # trained more than once in the surviving lineage
    contradictory: int  # ended more than once, otherwise
    misanswered: int  # ended by a group that answers something else than the ticket asked
    unproven: int  # ended according to the checkpoint, but the part of the journal that says how is damaged
    examples: Mapping[str, tuple[int, ...]]  # some ticket numbers of each of the five above

    wasted_steps: int  # committed by a replaced learner; uncommitted ones leave no trace
    wasted_tickets: int  # trained in those steps
    leftover_tickets: int  # stream entries whose ticket has ended; harmless
    leftover_groups: int  # stream entries already read, or whose ticket has ended; harmless
    malformed: Mapping[str, int]  # invalid stream entries, by what is wrong
    dead_letters: int
    eval_tickets: int  # stream entries of evaluation, which the sums above do not include
    eval_groups: int

    problems: tuple[str, ...]  # contradictions in the folder
    unchecked: tuple[str, ...]  # what could not be checked

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + sum(self.dropped.values()) + self.dead + self.outstanding

    @property
    def clean(self) -> bool:
        """Every ticket is accounted for, exactly once."""
        return self.balanced and not self.problems and not any(getattr(self, kind) for kind in WRONG)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "balanced": self.balanced, "clean": self.clean}


_MAX_READS = 20
_NUM_EXAMPLES = 10


def audit_folder(folder: Path, *, redis_url: str | None = None, run: str | None = None) -> Audit:
    """Audit the run in this folder, with its streams on this server; without one, from the folder alone.

    `run` is its name in Redis, by default the folder's. Raises UserError if the folder or the server does not hold the
    run, TransportError if commits follow each other too fast to read between them.
    """
    folder = folder.resolve()
    name = run or folder.name
    with nullcontext() if redis_url is None else open_server(redis_url) as client:
        commit, streams = _read_between_commits(folder, client, Keys(name))
    chain = read_chain(folder, commit)
    waste = read_waste(folder, commit, chain)
    books = AuditBooks(commit, chain, streams)
    wrong = {kind: getattr(books, kind) for kind in WRONG}
    counted = {kind: getattr(books, kind) for kind in ("trained", "dead", "outstanding", "waiting", "delivered")}
    return Audit(
        run=name,
        run_uid=commit.run_uid,
        folder=str(folder),
        redis=streams.server,
        learner_is_live=streams.learner_is_live,
        term=commit.term,
        checkpoint=commit.checkpoint,
        step=commit.step,
        issued=books.issued,
        dropped={reason: _count(mask) for reason, mask in books.dropped.items()},
        **{kind: _count(mask) for kind, mask in (counted | wrong).items()},
        examples={kind: _examples(mask) for kind, mask in wrong.items() if mask.any()},
        wasted_steps=waste.num_steps,
        wasted_tickets=waste.num_tickets,
        leftover_tickets=books.num_leftover_tickets,
        leftover_groups=books.num_leftover_groups,
        malformed={**streams.malformed, **books.foreign_entries()},
        dead_letters=streams.dead_letters,
        eval_tickets=streams.eval_tickets,
        eval_groups=streams.eval_groups,
        problems=(*commit.damaged, *chain.breaks, *books.disagreements()),
        unchecked=(*waste.unreadable, *_unchecked(streams, num_outstanding=_count(books.outstanding))),
    )


def _read_between_commits(folder: Path, client: redis.Redis | None, keys: Keys) -> tuple[LastCommit, Streams]:
    for _ in range(_MAX_READS):
        commit = read_commit(folder)
        streams = Streams() if client is None else read_streams(client, keys, run_uid=commit.run_uid)
        if read_commit(folder) == commit:
            return commit, streams
    raise TransportError(
        f"{folder}: a commit was made during each of {_MAX_READS} reads of the streams; try again, or pause the run"
    )


def _unchecked(streams: Streams, *, num_outstanding: int) -> tuple[str, ...]:
    if streams.server is not None:
        return ()
    outstanding = f"whether {num_outstanding} outstanding tickets are in it, and " if num_outstanding else ""
    return (f"without Redis: {outstanding}what is in the streams (malformed, left over, dead letters, evaluation)",)


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _examples(mask: Mask) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask)[:_NUM_EXAMPLES].tolist())
