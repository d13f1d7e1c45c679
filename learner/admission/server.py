"""The Redis server of a run: this learner's name towards it, and the lease by which one learner at a time has the run.

Waiting for the lease takes at most twice its length; a standby waits for as long as another learner holds the run.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import redis

from streamrl.config import schema
from streamrl.errors import RunGone, TransportError, UserError
from streamrl.learner.checkpoints.terms import known_run
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease, free_lease

_FREE_PATIENCE_S = 2.0  # an unfreed lease ends by itself
_NO_RUN_IDS = ("", "none")  # what torchrun sets when no run id was given


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


def holder_name(environment: Mapping[str, str]) -> str:
    """The lease holder's name: stable across restarts by one torchrun, so that they take over at once."""
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{os.getppid()}" if run_id in _NO_RUN_IDS else run_id


def was_restarted(environment: Mapping[str, str]) -> bool:
    """Whether torchrun restarted the ranks on this machine; machines that join, leave or restart do not count."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


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
