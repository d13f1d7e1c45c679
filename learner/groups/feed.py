"""Rank 0's side of the stream: issues tickets, reads groups, makes one plan per step.

      ┌── top_up ──► tickets ──► workers ──► groups ──┐
      │                                               ▼ read by the cursor, in order (`intake`)
    ledger ◄── settle ◄── plan ◄── ready ◄── whose, valid, how old, worth training?
                                                      │
      ▲───────────── dropped, failed, ignored ────────┘

`plan` reads until a batch is ready, waiting for groups at most `timeout_s`; `settle` resolves the batch once the
ranks have checked it. Only `plan` issues new tickets, that is, after the last step's weights were published, so a lag
of 0 is on-policy.

`state` is the feed's part of a checkpoint and may be taken at any time. Groups that were read but not resolved are its
carry, and are read again by the feed that resumes from it. `reconcile` finds what Redis has lost, and issues it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.counts import Datasets, Lengths
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.intake import NOT_LEASED, FailuresInRow, Intake
from streamrl.learner.groups.ledger import DEAD, DROPPED, TRAINED, FeedState
from streamrl.learner.groups.plan import Books, GroupCheck, Kind, Plan, balance
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.learner.groups.reconcile import Reconciler
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import Control, GroupStream
from streamrl.telemetry.progress import Wait

_ROUND_S = 1.0  # limit of one wait for groups, before operator's orders and deadline are checked again

log = structlog.get_logger(__name__)


class Feed:
    def __init__(
        self,
        *,
        stream: GroupStream,
        groups_per_step: int,
        journal: str | None,  # newest journal file
        books: Books,
        dispatch: Dispatch,
        reconciler: Reconciler,
        intake: Intake,
        failures: FailuresInRow,
        quarantine: Quarantine,
        lengths: Lengths,
        datasets: Datasets,
        wait_timers: WaitTimers,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._stream, self._dispatch, self._reconciler = stream, dispatch, reconciler
        self._intake, self._failures, self._quarantine = intake, failures, quarantine
        self._ledger, self._lag = books.ledger, books.lag
        self._ready_groups, self._backlog = books.ready_groups, books.backlog
        self._lengths, self._datasets, self._wait_timers = lengths, datasets, wait_timers
        self._groups_per_step, self._journal = groups_per_step, journal
        self._clock, self._sleep = clock, sleep
        self.control: Control = "run"  # the operator's order in effect
        self._next_listen = 0.0
        self._planned: Plan | None = None
        self._doubtful = True  # Redis and the ledger may differ: reconcile first

    @property
    def waits_for(self) -> Wait:
        """Why the last `plan` returned no batch."""
        return self._wait_timers.waits_for

    def note_version(self, version: int, step: int) -> None:
        """Note an announced version and its optimizer step."""
        self._lag.note(version, step)

    def listen(self) -> None:
        """Read the operator's orders; `plan` does so by itself."""
        orders = self._stream.orders()
        self.control = orders.control
        self._dispatch.retry_requests = list(orders.retries)
        self._next_listen = self._clock() + _ROUND_S  # or as soon as no group is left to read

    def plan(self, *, step: int, world_size: int, timeout_s: float) -> Plan | None:
        """The next batch, or what to do instead; None if nothing can be trained within `timeout_s`.

        `step` is the number of optimizer steps made. Raises TransportError when Redis fails; the caller may simply
        retry.
        """
        assert self._planned is None, "settle the plan before asking for the next"
        doubtful, self._doubtful = self._doubtful, True  # until this call succeeds
        if doubtful or self._stream.disturbed or self._wait_timers.reconcile_is_due:
            self.reconcile(step=step)
        self._wait_timers.begin()
        self._intake.drop_stale(step)
        plan = self._plan_until(self._clock() + timeout_s, step, world_size)
        self._doubtful = False
        if plan is not None and plan.kind is Kind.STEP:
            self._planned = plan
            self._quarantine.begin([entry.ticket for entry in plan.entries])
        return plan

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None:
        """Resolve the plan's groups by the ranks' verdicts. `trained=False`: the step itself was skipped."""
        assert plan is self._planned, "only the current plan can be settled"
        waiting = self._stream.waiting("train") if GroupCheck.MALFORMED in verdicts else set()
        self._quarantine.survived()
        outcomes = {
            GroupCheck.SOUND: TRAINED if trained else f"{DROPPED}non_finite",
            GroupCheck.MALFORMED: f"{DROPPED}malformed",
            GroupCheck.STALE: f"{DROPPED}stale",
        }
        for entry, verdict in zip(plan.entries, verdicts, strict=True):
            group = self._ready_groups.remove(entry.ticket)
            if verdict == GroupCheck.MISSING:  # lost by Redis after it was read; reconciling issues it again
                self._ledger.ignore("missing")
                self._doubtful = True
            elif verdict == GroupCheck.MALFORMED and (entry.ticket, group.header.identity) in waiting:
                self._intake.set_aside(group.entry_id, entry.ticket, NOT_LEASED)
            else:
                self._intake.end(group.header, outcomes[verdict], step=plan.step)
        self._planned = None
        self._wait_timers.step_follows()
        crashpoint("group.settled")

    def state(self) -> FeedState:
        return FeedState(
            cursor=self._intake.cursor,
            carry=tuple(self._ready_groups.all_ids()),
            ledger=self._ledger.state(),
            versions=self._lag.known(),
            lengths=self._lengths.known(),
            datasets=self._datasets.known(),
            curriculum=self._dispatch.curriculum(),
            journal=self._journal,
            uncommitted=self._ledger.uncommitted,
        )

    def committed(self, state: FeedState, *, step: int) -> None:
        """Note that the checkpoint with this state is committed, and trim Redis accordingly.

        Idempotent. If Redis fails here, the entries it could have freed stay until the next commit.
        """
        self._journal = state.journal
        self._wait_timers.committed()
        self._ledger.committed(state.ledger)
        ended = self._backlog.forget_freed(cursor=state.cursor, carry=state.carry, trim_below=state.trim_below)
        self._stream.commit(step=step, cursor=state.cursor, trim_below=state.trim_below, ended=ended)

    def request_commit(self) -> bool:
        """Request a commit just for the room it frees in Redis; False: it would free none, or it is too soon."""
        if self._backlog.freeable(self._ready_groups.all_ids()) <= 0 or not self._wait_timers.may_request_commit:
            return False
        self._wait_timers.commit_requested()
        return True

    def num_places(self, end: int) -> int:
        """How many places of the data the tickets below `end` stand for."""
        return self._ledger.retries.num_places(end)

    def metrics(self) -> dict[str, float]:
        dropped = {f"stream/dropped/{reason}": float(count) for reason, count in self._ledger.dropped()}
        ignored = {f"stream/ignored/{reason}": float(count) for reason, count in self._ledger.ignored.items()}
        return {
            "stream/issued": float(self._ledger.issued),
            "stream/outstanding": float(self._ledger.outstanding),
            "stream/groups_trained": float(self._ledger.outcomes[TRAINED]),
            "stream/groups_dropped": sum(dropped.values()),
            "stream/dead": float(self._ledger.outcomes[DEAD]),
            "stream/dead_letters": float(len(self._ledger.letters)),
            "stream/retries": float(len(self._ledger.retries)),
            "stream/backlog_bytes": self._backlog.expected(self._dispatch.num_on_the_way),
            "stream/straggler_wait_s": self._wait_timers.straggler_wait_s,
            **dropped,
            **ignored,
            **self._lengths.metrics(),
            **self._datasets.metrics(),
            **self._dispatch.metrics(),
        }

    def check_trained(self) -> None:
        """Raise TrainingError if no group was trained: such a run has not finished, though its data are used up."""
        self._failures.check_trained(self._ledger)

    def reconcile(self, *, step: int) -> None:
        """Compare Redis with the ledger and repair the differences."""
        assert self._planned is None, "a plan is with the ranks: settle it first"
        found = self._reconciler.reconcile(cursor=self._intake.cursor, step=step)
        self._failures.note_existing(group.entry_id for group in found.groups)
        self._wait_timers.reconciled()

    def _plan_until(self, deadline: float, step: int, world_size: int) -> Plan | None:
        waited = False
        self._next_listen = self._clock()
        while True:
            if self._clock() >= self._next_listen:
                self.listen()
                if self.control in ("run", "drain"):
                    self._dispatch.issue(step=step)  # tickets that a full server refused
            if self.control == "stop":
                return Plan(kind=Kind.STOP, step=step)
            if self.control == "run" or (self.control == "drain" and self._dispatch.refused):
                self._dispatch.top_up(step=step)
                if self._dispatch.wants_commit and self._wait_timers.may_request_commit:
                    self._wait_timers.commit_requested()
                    log.info("early checkpoint to free Redis memory", backlog_bytes=self._backlog.num_bytes)
                    return Plan(kind=Kind.COMMIT, step=step)
            if self.control != "pause" and (plan := self._make_plan(step, world_size)):
                return plan
            left_s = deadline - self._clock()
            if left_s <= 0 and waited:
                return None
            self._read_or_wait(step, max(0.0, min(left_s, _ROUND_S)))
            waited = True

    def _read_or_wait(self, step: int, wait_s: float) -> None:
        if self.control == "pause":
            self._wait_timers.paused()
            self._sleep(wait_s)
        elif self._intake.receive(step=step, wait_s=wait_s):
            return
        elif not self._dispatch.num_on_the_way:
            self._wait_timers.no_group_expected()
        else:
            self._wait_timers.check(num_outstanding=self._ledger.outstanding)
            if self._wait_timers.tickets_may_be_lost:
                self.reconcile(step=step)
        self._next_listen = self._clock()

    def _make_plan(self, step: int, world_size: int) -> Plan | None:
        """A full batch; the last, partial one when no more groups can come; or the end."""
        no_more_tickets = self.control == "drain" or self._dispatch.exhausted
        nothing_to_come = no_more_tickets and self._ledger.outstanding == len(self._ready_groups)
        if len(self._ready_groups) >= self._groups_per_step or (nothing_to_come and len(self._ready_groups)):
            num_stragglers = self._ready_groups.awaited(step)
            if num_stragglers and self._wait_timers.full_batch_may_wait:
                self._wait_timers.await_stragglers()
                return None
            self._wait_timers.full_batch_goes(num_stragglers=num_stragglers)
            return self._plan_step(step, world_size)
        if self._ready_groups.num_read < self._groups_per_step:  # a batch still being read again keeps its wait
            self._wait_timers.batch_is_not_full()
        if nothing_to_come:
            return Plan(kind=Kind.END if self._dispatch.exhausted else Kind.STOP, step=step)
        return None

    def _plan_step(self, step: int, world_size: int) -> Plan:
        batch = self._ready_groups.batch()
        chosen = self._quarantine.narrow([group.header.ticket for group in batch])
        batch = [group for group in batch if group.header.ticket in chosen]
        ranks = balance([group.header.num_tokens for group in batch], world_size)
        entries = (group.planned(rank) for group, rank in zip(batch, ranks, strict=True))
        return Plan(kind=Kind.STEP, step=step, entries=tuple(entries), num_answered=self._ledger.num_answered)
