"""What the learner keeps of its tickets and their groups: one set of books, which the feed's parts share."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config import schema
from streamrl.learner.groups.backlog import Backlog, largest_group
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import FeedState, Ledger
from streamrl.learner.groups.plan import ReadyGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    ledger: Ledger  # what became of each ticket
    lag: LagRule  # which versions there are, and what is too old
    ready_groups: ReadyGroups  # in hand, or to be read again
    backlog: Backlog  # bytes in Redis


def open_books(config: schema.Config, state: FeedState, *, largest_group_bytes: int | None = None) -> Books:
    """The books of a checkpoint's state. `largest_group_bytes`: if larger than the configuration implies."""
    ledger, lag = Ledger(state.ledger, state.uncommitted), LagRule(config.lag, state.versions)
    return Books(
        ledger=ledger,
        lag=lag,
        ready_groups=ReadyGroups(
            ledger=ledger, lag=lag, groups_per_step=config.training.groups_per_step, carry=state.carry
        ),
        backlog=Backlog(
            max_bytes=config.redis.max_backlog_bytes, largest_group=largest_group_bytes or largest_group(config)
        ),
    )
