"""The audit of one run: read the evidence, weigh it, put the verdict together.

The commit and the streams are read until no commit was made in between. With the commit that was the newest all the
time, whatever has not ended in it must be in the streams: they are trimmed by commits alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import redis

from streamrl.audit.books import Books, Mask
from streamrl.audit.commit import Commit, read_commit
from streamrl.audit.journal import read_chain, read_waste
from streamrl.audit.report import WRONG, Audit
from streamrl.audit.streams import Streams, open_server, read_streams
from streamrl.errors import TransportError
from streamrl.transport.keys import Keys

_LOOKS = 20
_NUM_EXAMPLES = 10


def audit_folder(folder: Path, *, redis_url: str | None = None, run: str | None = None) -> Audit:
    """Audit the run in this folder, with its streams at this server; without one, from the folder alone.

    `run` is its name in Redis, by default the folder's. Raises UserError when the folder or the server does not hold
    the run, TransportError when commits follow each other too fast to look between them.
    """
    folder = folder.resolve()
    name = run or folder.name
    with nullcontext() if redis_url is None else open_server(redis_url) as client:
        commit, streams = _look(folder, client, Keys(name))
    chain = read_chain(folder, commit)
    waste = read_waste(folder, commit, chain)
    books = Books(commit, chain, streams)
    wrong = {kind: getattr(books, kind) for kind in WRONG}
    counted = {kind: getattr(books, kind) for kind in ("trained", "dead", "outstanding", "waiting", "delivered")}
    return Audit(
        run=name,
        run_uid=commit.run_uid,
        folder=str(folder),
        redis=streams.server,
        learner_is_live=streams.learner_is_live,
        epoch=commit.epoch,
        checkpoint=commit.checkpoint,
        step=commit.step,
        issued=books.issued,
        dropped={reason: _count(mask) for reason, mask in books.dropped.items()},
        **{kind: _count(mask) for kind, mask in (counted | wrong).items()},
        examples={kind: _some(mask) for kind, mask in wrong.items() if mask.any()},
        wasted_steps=waste.num_steps,
        wasted_tickets=waste.num_tickets,
        leftover_tickets=books.num_leftover_tickets,
        leftover_groups=books.num_leftover_groups,
        malformed={**streams.malformed, **books.never_issued()},
        dead_letters=streams.dead_letters,
        eval_tickets=streams.eval_tickets,
        eval_groups=streams.eval_groups,
        problems=(*commit.damaged, *chain.breaks, *books.disagreements()),
        unchecked=(*waste.unreadable, *_unchecked(streams, num_outstanding=_count(books.outstanding))),
    )


def _look(folder: Path, client: redis.Redis | None, keys: Keys) -> tuple[Commit, Streams]:
    for _ in range(_LOOKS):
        commit = read_commit(folder)
        streams = Streams() if client is None else read_streams(client, keys, run_uid=commit.run_uid)
        if read_commit(folder) == commit:
            return commit, streams
    raise TransportError(
        f"{folder}: in {_LOOKS} looks at the streams a commit was made in each; ask again, or pause the run"
    )


def _unchecked(streams: Streams, *, num_outstanding: int) -> tuple[str, ...]:
    if streams.server is not None:
        return ()
    missing = f"that {num_outstanding} outstanding tickets are there, and " if num_outstanding else ""
    return (f"without Redis: {missing}what lies in the streams (malformed, left over, dead letters, evaluation)",)


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _some(mask: Mask) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask)[:_NUM_EXAMPLES].tolist())
