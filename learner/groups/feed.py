"""Rank 0's side of the stream: issues tickets, reads groups, makes one plan per step.

      ┌── top_up ──► tickets ──► workers ──► groups ──┐
      │                                               ▼ read by the cursor, in order
    ledger ◄── settle ◄── plan ◄── in hand ◄── accept: whose, valid (gate), how old, worth training?
                                                      │
      ▲───────────── dropped, failed, ignored ────────┘

`plan` reads until a batch is in hand, waiting for groups at most `timeout_s`; `settle` resolves the batch once the
ranks have checked it. Only `plan` issues new tickets, that is, after the last step's weights were published, so a lag
of 0 is on-policy. No content of a group can stop the feed.

`state` is the feed's part of a checkpoint and may be taken at any time. Groups that were read but not resolved are its
carry, and are read again by the feed that resumes from it. `reconcile` finds what Redis has lost, and issues it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from streamrl.config import schema
from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.backlog import Backlog, largest_group
from streamrl.learner.groups.counts import NOT_OURS, Datasets, Lengths
from streamrl.learner.groups.curriculum import PromptOrder, open_order
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.failures import FailuresInRow
from streamrl.learner.groups.gate import LATE_FAILURE, NOT_ASKED, NOT_LEASED, Gate
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import DEAD, DROPPED, TRAINED, FeedState, Ledger
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan, ReadyGroup, ReadyGroups, balance
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.groups.quarantine import QUARANTINED, Quarantine
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import Control, Entry, GroupStream
from streamrl.protocol.wire.group import GroupHeader
from streamrl.telemetry.progress import Wait

_READ_BYTES = 1 << 20  # approximate size of a read: larger replies cost more memory and gain nothing
_ROUND_S = 1.0  # limit of one wait for groups, before operator's orders and deadline are checked again

log = structlog.get_logger(__name__)


class Feed:
    def __init__(
        self,
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
    ) -> None:
        state = state or FeedState()
        self._stream, self._groups_per_step = stream, config.training.groups_per_step
        self._reason_of_algorithm, self._quarantine = drop_reason, quarantine or Quarantine()
        self._failures = FailuresInRow(config.training.max_failed_in_row)
        self._wait_timers = WaitTimers(config, clock)
        self._clock, self._sleep = clock, sleep
        self._ledger = Ledger(state.ledger, state.uncommitted)
        self._lengths = Lengths(config.max_response_tokens, state.lengths)
        self._datasets = Datasets(lambda ticket: self._dispatch.dataset_of(ticket), state.datasets)
        self._lag = LagRule(config.lag, state.versions)
        self._ready_groups = ReadyGroups(
            ledger=self._ledger, lag=self._lag, groups_per_step=self._groups_per_step, carry=state.carry
        )
        self._gate = Gate(
            stream=stream,
            ledger=self._ledger,
            ready_groups=self._ready_groups,
            failures=self._failures,
            run_uid=run_uid,
            fingerprint=fingerprint,
            max_samples=config.sampling.num_samples,
        )
        self._backlog = Backlog(
            max_bytes=config.redis.max_backlog_bytes, largest_group=largest_group_bytes or largest_group(config)
        )
        self._dispatch = Dispatch(
            stream=stream,
            prompts=prompts,
            order=order or open_order(config, prompts, state=state),
            ledger=self._ledger,
            lag=self._lag,
            ready_groups=self._ready_groups,
            backlog=self._backlog,
            config=config,
            run_uid=run_uid,
        )
        self._cursor = state.cursor
        self._journal = state.journal
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
        self._drop_stale(step)
        plan = self._plan_until(self._clock() + timeout_s, step, world_size)
        self._doubtful = False
        if plan is not None and plan.kind is Kind.STEP:
            self._planned = plan
            self._quarantine.begin([entry.ticket for entry in plan.entries])
        return plan

    def settle(self, plan: Plan, verdicts: Sequence[int], *, trained: bool = True) -> None:
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
            held = self._ready_groups.remove(entry.ticket)
            if verdict == GroupCheck.MISSING:  # lost by Redis after it was read; reconciling issues it again
                self._ledger.ignore("missing")
                self._doubtful = True
            elif verdict == GroupCheck.MALFORMED and (entry.ticket, held.header.identity) in waiting:
                self._set_aside(held.entry_id, entry.ticket, NOT_LEASED)
            else:
                self._end(held.header, outcomes[GroupCheck(verdict)], step=plan.step)
        self._planned = None
        self._wait_timers.step_follows()
        crashpoint("group.settled")

    def state(self) -> FeedState:
        return FeedState(
            cursor=self._cursor,
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

    def commit_would_free(self) -> bool:
        """Whether to commit just for the room it frees in Redis; also starts the pause before the next such commit."""
        return self._backlog.freeable(self._ready_groups.all_ids()) > 0 and self._wait_timers.may_request_commit()

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
        found = self._dispatch.reconcile(cursor=self._cursor, step=step)
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
                if self._dispatch.wants_commit and self._wait_timers.may_request_commit():
                    log.info("early checkpoint to free Redis memory", backlog_bytes=self._backlog.num_bytes)
                    return Plan(kind=Kind.COMMIT, step=step)
            if self.control != "pause" and (plan := self._ready(step, world_size)):
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
        elif self._receive(step, wait_s):
            return
        elif not self._dispatch.num_on_the_way:
            self._wait_timers.no_group_expected()
        else:
            self._wait_timers.check(num_outstanding=self._ledger.outstanding)
            if self._wait_timers.tickets_may_be_lost:
                self.reconcile(step=step)
        self._next_listen = self._clock()

    def _ready(self, step: int, world_size: int) -> Plan | None:
        """A full batch; the last, partial one when no more groups can come; or the end."""
        no_more_tickets = self.control == "drain" or self._dispatch.exhausted
        nothing_to_come = no_more_tickets and self._ledger.outstanding == len(self._ready_groups)
        if len(self._ready_groups) >= self._groups_per_step or (nothing_to_come and len(self._ready_groups)):
            if self._wait_timers.batch_may_wait(self._ready_groups.awaited(step)):
                return None
            batch = self._batch()
            ranks = balance([held.header.num_tokens for held in batch], world_size)
            entries = (held.planned(rank) for held, rank in zip(batch, ranks, strict=True))
            return Plan(kind=Kind.STEP, step=step, entries=tuple(entries), num_answered=self._ledger.num_answered)
        if self._ready_groups.num_read < self._groups_per_step:  # a batch still being read again keeps its wait
            self._wait_timers.batch_is_not_full()
        if nothing_to_come:
            return Plan(kind=Kind.END if self._dispatch.exhausted else Kind.STOP, step=step)
        return None

    def _batch(self) -> list[ReadyGroup]:
        batch = self._ready_groups.batch()
        chosen = self._quarantine.narrow([held.header.ticket for held in batch])
        return [held for held in batch if held.header.ticket in chosen]

    def _receive(self, step: int, wait_s: float) -> bool:
        """Read some of the groups still lacking, the carry first; return whether there were any."""
        count = min(self._ready_groups.lacking, self._backlog.num_groups_in(_READ_BYTES))
        if self._ready_groups.unread:
            ids = self._ready_groups.unread[:count]
            for entry in self._stream.fetch("train", ids):
                del self._ready_groups.unread[0]
                if entry is not None:  # None: lost by Redis, and reconciling has issued its ticket again
                    self._accept(entry, step)
            return True
        entries = self._stream.read("train", after=self._cursor, count=count, block_ms=int(wait_s * 1000))
        for entry in entries:
            self._wait_timers.group_came()  # not for groups read again: they show nothing about the workers
            self._cursor = entry.id
            self._accept(entry, step)
            crashpoint("group.read")
        return bool(entries)

    def _accept(self, entry: Entry, step: int) -> None:
        """Take the group for training, drop its ticket, count a failure, or ignore it.

        `step` is the step that would train this group. The ranks check bodies.
        """
        num_bytes = len(entry.header) + len(entry.body)
        self._backlog.add(entry.id, num_bytes)
        header = self._gate.header(entry)
        reason = self._gate.reason_to_ignore(entry, header)
        if reason is not None:
            self._set_aside(entry.id, entry.number, reason)
        elif header is None:
            self._ledger.resolve(entry.number, f"{DROPPED}malformed", step=step + 1)
        elif not header.failed:
            self._backlog.expect(num_bytes)
            self._failures.sound()
            self._keep_or_drop(entry, header, step)
        else:
            self._dispatch.failed(entry.number, error=header.error, step=step)
            self._failures.failed(self._dispatch.prompt_of(entry.number), error=header.error)

    def _set_aside(self, entry_id: str, number: int, reason: str) -> None:
        """Ignore a group; its ticket stays as it is."""
        self._ledger.ignore(reason)
        if reason == LATE_FAILURE or (reason == NOT_ASKED and not self._gate.still_waits(number)):
            self._wait_timers.reconcile_soon()  # Redis and the ledger disagree
        if reason in (NOT_ASKED, NOT_LEASED) and self._ledger.ignored[reason].bit_count() == 1:  # 1, 2, 4, 8, ...
            count = self._ledger.ignored[reason]
            log.warning("group set aside", entry=entry_id, ticket=number, reason=reason, so_far=count)

    def _keep_or_drop(self, entry: Entry, header: GroupHeader, step: int) -> None:
        reason = self._reason_to_drop(header, step)
        if reason is None:
            self._ready_groups.take(ReadyGroup(entry.id, header, entry.body))
        else:
            self._end(header, f"{DROPPED}{reason}", step=step)

    def _reason_to_drop(self, header: GroupHeader, step: int) -> str | None:
        if header.fingerprint != self._gate.fingerprint:
            return "wrong_model"
        if self._lag.is_stale(header.min_version, header.max_version, step):
            return "stale"
        return QUARANTINED if self._quarantine.holds(header.ticket) else self._reason_of_algorithm(header)

    def _drop_stale(self, step: int) -> None:
        """Drop groups that went stale in hand; happens only if the most urgent groups are trained first."""
        for held in self._ready_groups:
            if self._lag.is_stale(held.header.min_version, held.header.max_version, step):
                self._end(self._ready_groups.remove(held.header.ticket).header, f"{DROPPED}stale", step=step)

    def _end(self, header: GroupHeader, outcome: str, *, step: int) -> None:
        self._ledger.resolve(header.ticket, outcome, step=step + 1, answered=header.identity)
        self._lengths.count(header, dropped=outcome != TRAINED)
        self._datasets.count(header, outcome=outcome, step=step)
        if outcome not in NOT_OURS:
            self._dispatch.answered(header)
