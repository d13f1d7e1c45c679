"""Rank 0's side of the stream: tickets out, groups in, one plan a step.

      ┌── top_up ──► tickets ──► workers ──► groups ──┐
      │                                               ▼ read by the cursor, in order
    ledger ◄── settle ◄── plan ◄── in hand ◄── judge: whose, what, how old, worth training?
                                                      │
      ▲───────────── dropped, failed, ignored ────────┘

`plan` reads until a batch is in hand, and waits for groups at most as long as it is told; `settle` resolves the batch
after the ranks have looked at it. New tickets are issued from `plan` only, that is after the last step's weights were
published, so that a lag of 0 is on-policy. Nothing that a group may contain stops the feed.

`state` is what a checkpoint holds of all this, at any moment: what is read and not resolved is its carry, and is read
again by the feed that starts from it. Whatever Redis has lost meanwhile, `reconcile` finds out and issues again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from learner.data import PromptSet
from learner.dispatch import Dispatch
from learner.judge import Drop, Failed, Ignore, Judge, Take
from learner.lag import LagRule
from learner.ledger import DEAD, DROPPED, TRAINED, Ledger, StreamState
from learner.plan import Kind, Plan, PlanEntry, balance
from streamrl.config import schema
from streamrl.errors import TrainingError
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import Entry
from streamrl.wire.group import GroupHeader

_ROUND_S = 1.0  # a group is waited for so long before the operator's word and the deadline are looked at again
_RECONCILE_AFTER_S = 60.0  # without a group for so long, tickets may have been lost; looking is cheap

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A group that waits for its batch, or for the verdict on it."""

    entry_id: str
    header: GroupHeader

    def planned(self, rank: int) -> PlanEntry:
        return PlanEntry(
            entry_id=self.entry_id,
            ticket=self.header.ticket,
            digest=self.header.digest,
            num_tokens=self.header.num_tokens,
            rank=rank,
        )


class Feed:
    def __init__(
        self,
        *,
        stream: GroupStream,
        prompts: PromptSet,
        config: schema.Config,
        run_uid: str,
        fingerprint: str,  # of model and tokenizer, as groups must carry it
        keep: Callable[[GroupHeader], str | None],  # the algorithm's reason to drop a group, if it has one
        state: StreamState | None = None,  # of the checkpoint to go on from
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        state = state or StreamState()
        self._stream = stream
        self._run_uid = run_uid
        self._groups_per_step = config.training.groups_per_step
        self._idle_timeout_s = config.learner.idle_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._ledger = Ledger(state.ledger)
        self._lag = LagRule(config.lag, state.versions)
        self._dispatch = Dispatch(
            stream=stream, prompts=prompts, ledger=self._ledger, lag=self._lag, config=config, run_uid=run_uid
        )
        self._judge = Judge(
            run_uid=run_uid,
            fingerprint=fingerprint,
            max_samples=config.sampling.num_samples,
            ledger=self._ledger,
            lag=self._lag,
            keep=keep,
        )
        self._cursor = state.cursor
        self._journal = state.journal
        self._unread = list(state.carry)  # ids up to the cursor that have yet to be read again
        self._in_hand: dict[int, _Held] = {}  # by ticket, in the stream's order; read and not resolved
        self._planned: Plan | None = None
        self._counter_is_sure = False  # until Redis was asked for tickets issued after the checkpoint
        self._doubtful = True  # something may be missing in Redis, or may have been written without our knowing
        self._waiting_since: float | None = None  # no group came since then; None: a step is being made
        self._reconciled_at = clock()

    def note_version(self, version: int, step: int) -> None:
        """A version was announced, with the weights after so many optimizer steps."""
        self._lag.note(version, step)

    def plan(self, *, step: int, world_size: int, timeout_s: float) -> Plan | None:
        """The next batch, or what to do instead; None when there is nothing to train within this time.

        `step` is the number of optimizer steps made. Raises TransportError when Redis fails; just call again.
        """
        assert self._planned is None, "settle the plan before asking for the next"
        if self._doubtful or self._stream.disturbed:
            self.reconcile(step=step)
        self._doubtful = True  # until this has gone through
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        plan = self._plan_until(self._clock() + timeout_s, step, world_size)
        self._doubtful = False
        if plan is not None and plan.kind is Kind.STEP:
            self._planned = plan
        return plan

    def settle(self, plan: Plan, accepted: Sequence[bool], *, trained: bool = True) -> None:
        """The ranks' verdict: which groups of the plan were sound. `trained=False`: the step itself was skipped."""
        assert plan is self._planned, "only the current plan can be settled"
        for entry, sound in zip(plan.entries, accepted, strict=True):
            outcome = TRAINED if trained else f"{DROPPED}non_finite"
            self._ledger.resolve(entry.ticket, outcome if sound else f"{DROPPED}malformed", step=plan.step + 1)
            del self._in_hand[entry.ticket]
        self._planned = None
        self._waiting_since = None

    def state(self) -> StreamState:
        return StreamState(
            cursor=self._cursor,
            carry=(*(held.entry_id for held in self._in_hand.values()), *self._unread),
            ledger=self._ledger.state(),
            versions=self._lag.known(),
            journal=self._journal,
            uncommitted=self._ledger.uncommitted,
        )

    def committed(self, state: StreamState, *, step: int) -> None:
        """The checkpoint with this state, as it was committed, has its name. Harmless when called again; when Redis
        fails here, only what it could have freed stays until the next commit."""
        self._journal = state.journal
        self._ledger.committed(state.ledger)
        self._stream.commit(step=step, cursor=state.cursor, trim_below=state.trim_below)

    def metrics(self) -> dict[str, float]:
        dropped = {f"stream/dropped/{reason}": float(count) for reason, count in self._ledger.dropped()}
        ignored = {f"stream/ignored/{reason}": float(count) for reason, count in self._ledger.ignored.items()}
        return {
            "stream/issued": float(self._ledger.issued),
            "stream/outstanding": float(self._ledger.outstanding),
            "stream/groups_trained": float(self._ledger.outcomes[TRAINED]),
            "stream/groups_dropped": sum(dropped.values()),
            "stream/dead": float(self._ledger.outcomes[DEAD]),
            **dropped,
            **ignored,
        }

    def reconcile(self, *, step: int) -> None:
        """Find out what Redis has and has not, and put right what differs from the ledger."""
        assert self._planned is None, "a plan is with the ranks: settle it first"
        self._stream.restore(cursor=self._cursor)
        # What was in hand is read again: its bodies may be gone, and the ranks have yet to fetch them.
        self._unread = [*(held.entry_id for held in self._in_hand.values()), *self._unread]
        self._in_hand.clear()
        # Tickets first: delivering turns a ticket into a group, so one that moves in between is seen at least once.
        tickets = self._stream.present_tickets("train")
        groups = [number for _, number in self._stream.present_groups("train", after=self._cursor)]
        present = {*tickets, *groups, *self._numbers_of_unread()}
        if not self._counter_is_sure:
            self._ledger.issued = self._counter_shown_by(present)
            self._counter_is_sure = True
        resolved = [entry_id for number, entry_id in tickets.items() if not self._ledger.is_open(number)]
        missing = [number for number in self._ledger.open_tickets() if number not in present]
        if resolved:
            self._stream.delete_tickets("train", resolved)
        self._dispatch.issue(missing, step=step)
        self._reconciled_at = self._clock()
        log.info("reconciled", present=len(present), deleted=len(resolved), issued_again=len(missing))

    def _plan_until(self, deadline: float, step: int, world_size: int) -> Plan | None:
        waited = False
        while True:
            control = self._stream.control()
            if control == "stop":
                return Plan(kind=Kind.STOP, step=step)
            if control == "run":
                self._dispatch.top_up(step=step)
            if control != "pause" and (plan := self._ready(step, world_size, draining=control == "drain")):
                return plan
            left_s = deadline - self._clock()
            if left_s <= 0 and waited:
                return None
            wait_s = max(0.0, min(left_s, _ROUND_S))
            if control == "pause":
                self._waiting_since = self._clock()  # nothing comes because nothing should
                self._sleep(wait_s)
            elif not self._receive(step, wait_s):
                self._look_at_patience(step)
            waited = True

    def _ready(self, step: int, world_size: int, *, draining: bool) -> Plan | None:
        """A full batch; the last, partial one when nothing more can come; or the end."""
        no_more_tickets = draining or self._dispatch.exhausted
        nothing_to_come = no_more_tickets and self._ledger.outstanding == len(self._in_hand)
        if len(self._in_hand) >= self._groups_per_step or (nothing_to_come and self._in_hand):
            ranks = balance([held.header.num_tokens for held in self._in_hand.values()], world_size)
            entries = (held.planned(rank) for held, rank in zip(self._in_hand.values(), ranks, strict=True))
            return Plan(kind=Kind.STEP, step=step, entries=tuple(entries))
        if nothing_to_come:
            return Plan(kind=Kind.END if self._dispatch.exhausted else Kind.STOP, step=step)
        return None

    def _receive(self, step: int, wait_s: float) -> bool:
        """Read at most what the batch lacks, the carry first; whether anything was there."""
        lacking = self._groups_per_step - len(self._in_hand)
        if self._unread:
            ids = self._unread[:lacking]
            for entry in self._stream.fetch("train", ids):
                del self._unread[0]
                if entry is not None:  # lost with Redis: reconciling has issued its ticket again
                    self._accept(entry, step)
            return True
        entries = self._stream.read("train", after=self._cursor, count=lacking, block_ms=int(wait_s * 1000))
        for entry in entries:
            self._cursor = entry.id
            self._accept(entry, step)
        return bool(entries)

    def _accept(self, entry: Entry, step: int) -> None:
        self._waiting_since = self._clock()
        match self._judge(entry, step=step, in_hand=self._in_hand):
            case Take(header):
                self._in_hand[header.ticket] = _Held(entry.id, header)
            case Drop(reason):
                self._ledger.resolve(entry.number, f"{DROPPED}{reason}", step=step + 1)
            case Failed(error):
                self._dispatch.failed(entry.number, error=error, step=step)
            case Ignore(reason):
                self._ledger.ignore(reason)

    def _look_at_patience(self, step: int) -> None:
        """Nothing came: look after lost tickets now and then, and give up in the end."""
        assert self._waiting_since is not None, "only called while waiting"
        now = self._clock()
        if now - self._waiting_since >= self._idle_timeout_s:
            raise TrainingError(
                f"no group arrived for {now - self._waiting_since:.0f} s (learner.idle_timeout_s) and "
                f"{self._ledger.outstanding} tickets are outstanding; do workers run, and do they reach Redis?"
            )
        if now - max(self._waiting_since, self._reconciled_at) >= _RECONCILE_AFTER_S:
            self.reconcile(step=step)

    def _numbers_of_unread(self) -> list[int]:
        """Tickets whose groups are in the carry and still in the stream."""
        entries = self._stream.fetch("train", self._unread) if self._unread else []
        return [entry.number for entry in entries if entry is not None and entry.run_uid == self._run_uid]

    def _counter_shown_by(self, present: Iterable[int]) -> int:
        """The ticket counter, when Redis holds tickets or groups that were issued after the checkpoint.

        What was issued since then is still there, but for what Redis has lost; so beyond a gap of more than a window
        nothing counts. A forged number far up must not make us issue all those below it, and to issue genuine ones
        that lie beyond a gap once more costs only their work.
        """
        counter = self._ledger.issued
        for number in sorted(number for number in present if counter <= number < self._dispatch.num_tickets):
            if number - counter > self._dispatch.window:
                break
            counter = number + 1
        return counter
