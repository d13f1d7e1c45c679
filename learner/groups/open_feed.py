"""Opens the feed: all its parts, continued from one state of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamrl.config import schema
from streamrl.learner.groups.backlog import Backlog, largest_group
from streamrl.learner.groups.counts import Datasets, Lengths
from streamrl.learner.groups.curriculum import PromptOrder, open_order
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.feed import Feed
from streamrl.learner.groups.intake import FailuresInRow, Gate, Intake
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import FeedState, Ledger
from streamrl.learner.groups.plan import Books, ReadyGroups
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.learner.groups.reconcile import Reconciler
from streamrl.learner.groups.tickets import Tickets
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import GroupStream
from streamrl.protocol.wire.group import GroupHeader


def open_feed(
    *,
    stream: GroupStream,
    prompts: PromptSet,
    config: schema.Config,
    run_uid: str,
    fingerprint: str,  # of model and tokenizer; groups must carry it
    drop_reason: Callable[[GroupHeader], str | None],  # the algorithm's; it returns None for a group to train
    state: FeedState | None = None,  # of the checkpoint to resume from
    quarantine: Quarantine | None = None,  # None: no ticket is suspected
    order: PromptOrder | None = None,  # None: by the settings, stored only in checkpoints
    largest_group_bytes: int | None = None,  # if larger than the configuration implies
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Feed:
    state, quarantine = state or FeedState(), quarantine or Quarantine()
    order = order or open_order(config, prompts, state=state)
    books = _open_books(config, state, largest_group_bytes)
    tickets = Tickets(prompts=prompts, order=order, ledger=books.ledger, config=config, run_uid=run_uid)
    dispatch = Dispatch(stream=stream, tickets=tickets, order=order, books=books, config=config)
    gate = Gate(
        stream=stream,
        ledger=books.ledger,
        ready_groups=books.ready_groups,
        failures=(failures := FailuresInRow(config.training.max_failed_in_row)),
        run_uid=run_uid,
        fingerprint=fingerprint,
        max_samples=config.sampling.num_samples,
    )
    intake = Intake(
        stream=stream,
        cursor=state.cursor,
        gate=gate,
        drop_reason=drop_reason,
        books=books,
        tickets=tickets,
        dispatch=dispatch,
        failures=failures,
        quarantine=quarantine,
        lengths=(lengths := Lengths(config.max_response_tokens, state.lengths)),
        datasets=(datasets := Datasets(tickets.dataset_of, state.datasets)),
        wait_timers=(wait_timers := WaitTimers(config, clock)),
    )
    reconciler = Reconciler(stream=stream, order=order, books=books, tickets=tickets, dispatch=dispatch, config=config)
    return Feed(
        stream=stream,
        groups_per_step=config.training.groups_per_step,
        journal=state.journal,
        books=books,
        dispatch=dispatch,
        reconciler=reconciler,
        intake=intake,
        failures=failures,
        quarantine=quarantine,
        lengths=lengths,
        datasets=datasets,
        wait_timers=wait_timers,
        clock=clock,
        sleep=sleep,
    )


def _open_books(config: schema.Config, state: FeedState, largest_group_bytes: int | None) -> Books:
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
