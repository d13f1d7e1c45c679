"""The parts that a feed is assembled from, all continued from one state of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.config import schema
from streamrl.learner.groups.books import Books, open_books
from streamrl.learner.groups.counts import Datasets, Lengths
from streamrl.learner.groups.curriculum import PromptOrder, open_order
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.failures import FailuresInRow
from streamrl.learner.groups.gate import Gate
from streamrl.learner.groups.intake import Intake
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.learner.groups.reconcile import Reconciler
from streamrl.learner.groups.tickets import Tickets
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import GroupStream
from streamrl.protocol.wire.group import GroupHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedParts:
    stream: GroupStream
    groups_per_step: int
    journal: str | None  # newest journal file
    books: Books
    dispatch: Dispatch
    reconciler: Reconciler
    intake: Intake
    failures: FailuresInRow
    quarantine: Quarantine
    lengths: Lengths
    datasets: Datasets
    wait_timers: WaitTimers
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def make_feed_parts(
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
) -> FeedParts:
    state, quarantine = state or FeedState(), quarantine or Quarantine()
    order = order or open_order(config, prompts, state=state)
    books = open_books(config, state, largest_group_bytes=largest_group_bytes)
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
    return FeedParts(
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
