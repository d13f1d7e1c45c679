"""The promise of the feed, against anything in any order: every ticket ends exactly once in the surviving lineage.

The model beside the feed is the list of tickets that were trained, with the prompts that were answered, as a checkpoint
would hold the weights: a crash cuts it back to the last commit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.errors import TransportError
from streamrl.held_folders import scratch_folder
from streamrl.learner.groups.ledger import TRAINED
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from tests.feed_world import FeedWorld, encode_answer, encode_failure, make_config
from tests.helpers import make_ticket

NUM_PROMPTS = 7
NUM_TICKETS = 2 * NUM_PROMPTS
GROUP = sum(len(part) for part in encode_answer(make_ticket(0)))
some_ticket = st.integers(0, NUM_TICKETS + 2)
some_verdicts = st.lists(st.sampled_from([*[GroupCheck.SOUND] * 5, *GroupCheck]), min_size=3, max_size=3)
# Hypothesis leaves rules out of a run as it likes, and without plans a run shows little; so others may go on to one.
then_go_on = st.none() | some_verdicts


class Crashes(RuleBasedStateMachine):
    @initialize(
        groups_per_step=st.integers(1, 3),
        max_lag=st.integers(0, 2),
        stale=st.sampled_from(["keep", "mask", "wait", "drop"]),
        budget=st.sampled_from([1, 5, 1000]),
        max_attempts=st.integers(1, 2),
        curriculum=st.booleans(),
    )
    def begin(
        self, groups_per_step: int, max_lag: int, stale: str, budget: int, max_attempts: int, curriculum: bool
    ) -> None:
        config = make_config(
            data={"curriculum": curriculum},
            redis={"max_backlog_bytes": budget * GROUP},
            training={"groups_per_step": groups_per_step, "max_epochs": 2},
            lag={"max_steps": max_lag, "stale": stale},
            worker={"max_attempts": max_attempts},
            learner={"idle_timeout_s": 1e9},
        )
        self.stack = ExitStack()
        draws = self.stack.enter_context(scratch_folder(in_memory=True))
        self.world = FeedWorld(config, num_prompts=NUM_PROMPTS, draws=draws)
        self.trained: list[int] = []
        self.committed: list[int] = []
        self.answered: dict[str, int] = {}  # by the group's entry, which prompt the worker was given
        self.plan_in_work: Plan | None = None

    # Workers, and whoever else may write

    @rule(pick=st.integers(0, 100), count=st.integers(1, 8), dull=st.sampled_from([False, False, False, True]),
          then=then_go_on)  # fmt: skip
    def deliver(self, pick: int, count: int, dull: bool, then: list[GroupCheck] | None) -> None:
        for number in self._some_of(sorted(self.world.tickets()), pick, count):
            prompt = self.world.tickets()[number].prompt_index
            self.world.answer(number, rewards=(1.0, 1.0) if dull else (0.0, 1.0))
            self.answered[list(self.world.server.groups["train"])[-1]] = prompt
        self._go_on(then)

    @rule(pick=st.integers(0, 100), count=st.integers(1, 2), then=then_go_on)
    def report_failure(self, pick: int, count: int, then: list[GroupCheck] | None) -> None:
        for number in self._some_of(sorted(self.world.tickets()), pick, count):
            self.world.fail(number)
        self._go_on(then)

    @rule(number=some_ticket)
    def deliver_unasked(self, number: int) -> None:
        header, body = encode_answer(make_ticket(number))
        self.world.forge(number, header=header, body=body)

    @rule(number=some_ticket, failed=st.booleans())
    def forge(self, number: int, failed: bool) -> None:
        self.world.forge(number, header=encode_failure(make_ticket(number))[0] if failed else b"rubbish")

    @rule(pick=st.integers(0, 100), spoiled=st.booleans(), then=then_go_on)
    def lose_or_spoil_a_ticket(self, pick: int, spoiled: bool, then: list[GroupCheck] | None) -> None:
        for number in self._some_of(sorted(self.world.tickets()), pick):
            entry_id = self.world.ticket_id(number)
            if spoiled:
                self.world.server.rotten.add(entry_id)
            else:
                del self.world.server.tickets["train"][entry_id]
        self._go_on(then)

    @precondition(lambda self: self.world.server.dead)
    @rule(pick=st.integers(0, 100), count=st.integers(1, 2), then=then_go_on)
    def ask_for_a_retry(self, pick: int, count: int, then: list[GroupCheck] | None) -> None:
        letters = [ticket.number for ticket, _ in self.world.server.dead]
        for number in self._some_of(letters, pick, count):
            self.world.server.ask_for_retry(number)
        self._go_on(then)

    @precondition(lambda self: self.world.server.dead)
    @rule(pick=st.integers(0, 100), lost=st.booleans(), then=then_go_on)
    def lose_or_purge_a_letter(self, pick: int, lost: bool, then: list[GroupCheck] | None) -> None:
        letters = self.world.server.dead
        ticket, _ = letters.pop(pick % len(letters))
        if not lost:
            self.world.server.purged.add(ticket.number)
            self.world.server.retry_requests.discard(ticket.number)
        self._go_on(then)

    @rule(then=then_go_on)
    def lose_everything(self, then: list[GroupCheck] | None) -> None:
        self.world.server.flush()
        self._go_on(then)

    @rule(full=st.booleans(), then=then_go_on)
    def fill_or_make_room(self, full: bool, then: list[GroupCheck] | None) -> None:
        self.world.server.full = full
        self._go_on(then)

    # The learner

    @precondition(lambda self: self.plan_in_work is None)
    @rule(long=st.booleans(), fault=st.sampled_from([None, "issue", "dead", "letters", "restore", "delete_tickets"]),
          moment=st.sampled_from(["before", "after"]), disk_is_full=st.booleans(),
          verdicts=st.none() | some_verdicts)  # fmt: skip
    def plan(
        self, long: bool, fault: str | None, moment: str, disk_is_full: bool, verdicts: list[GroupCheck] | None
    ) -> None:
        def strike(point: str) -> None:
            if point == f"{fault}:{moment}":
                raise TransportError("the connection was lost")

        self.world.server.fault = strike
        try:
            plan = self.world.plan(timeout_s=130.0 if long else 0.0)
        except TransportError:
            plan = None
        self.world.server.fault = lambda point: None
        if plan is not None and plan.kind is Kind.COMMIT and not disk_is_full:
            self.commit(told=True)
        if plan is not None and plan.kind is Kind.STEP:
            assert 0 < len(plan.entries) <= self.world.config.training.groups_per_step
            if self.world.config.lag.stale in ("wait", "drop"):
                assert max(self.world.lags(plan), default=0) <= self.world.config.lag.max_steps
            self.plan_in_work = plan
            if verdicts is not None:
                self.settle(verdicts, lost=True)

    @precondition(lambda self: self.plan_in_work is not None)
    @rule(verdicts=some_verdicts, lost=st.booleans())
    def settle(self, verdicts: list[GroupCheck], lost: bool) -> None:
        plan, self.plan_in_work = self.plan_in_work, None
        assert plan is not None
        for entry, verdict in zip(plan.entries, verdicts, strict=False):
            if verdict is GroupCheck.SOUND:
                self.trained.append(entry.ticket)
                self._check_prompt(entry.ticket, entry.entry_id)
            elif verdict is GroupCheck.MISSING and lost:
                self.world.server.groups["train"].pop(entry.entry_id, None)
        self.world.train(plan, verdicts[: len(plan.entries)])

    @rule(told=st.booleans())
    def commit(self, told: bool) -> None:
        """A checkpoint; a crash in between may lose its trim of the stream."""
        self.world.commit(told=told)
        self.committed = list(self.trained)

    @rule(then=then_go_on)
    def crash(self, then: list[GroupCheck] | None) -> None:
        self.trained, self.plan_in_work = list(self.committed), None
        self.world.start()
        self._go_on(then)

    @invariant()
    def no_ticket_is_trained_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))

    @invariant()
    def the_books_balance(self) -> None:
        m = self.world.feed.metrics()
        ended = m["stream/groups_trained"] + m["stream/groups_dropped"] + m["stream/dead"]
        assert m["stream/issued"] == ended + m["stream/outstanding"]
        assert m["stream/groups_trained"] == len(self.trained)
        assert m["stream/issued"] <= NUM_TICKETS + m["stream/retries"]

    @invariant()
    def no_dead_ticket_is_repeated_twice(self) -> None:
        repeated = list(self.world.feed.state().ledger.retries.values())
        assert len(repeated) == len(set(repeated))

    @invariant()
    def the_journal_says_how_each_ticket_ended(self) -> None:
        ended = self.world.ended()
        assert len(ended) == len({ending.ticket for ending in ended})
        assert Counter(ending.outcome for ending in ended) == self.world.committed.ledger.outcomes
        assert sorted(e.ticket for e in ended if e.outcome == TRAINED) == sorted(self.committed)

    def teardown(self) -> None:
        """From wherever it came to: honest workers, and every ticket ends."""
        if not hasattr(self, "world"):
            return
        with self.stack:
            self._finish()

    def _finish(self) -> None:
        if self.plan_in_work is not None:
            self.settle([GroupCheck.SOUND] * 3, lost=False)
        self.world.server.full = False
        self.trained += self.world.run_to_end()
        self.no_ticket_is_trained_twice()
        self.the_books_balance()
        metrics = self.world.feed.metrics()
        num_tickets = NUM_TICKETS + metrics["stream/retries"]
        assert metrics["stream/issued"] == num_tickets
        assert metrics["stream/outstanding"] == 0
        self.world.feed.reconcile(step=self.world.step)
        assert self.world.server.retry_requests == set()
        ledger = self.world.feed.state().ledger
        assert sorted(ticket.number for ticket, _ in self.world.server.dead) == sorted(ledger.letters or ())
        assert (ledger.watermark, ledger.exceptions) == (num_tickets, ())

    def _go_on(self, verdicts: list[GroupCheck] | None) -> None:
        if verdicts is not None and self.plan_in_work is None:
            self.plan(long=True, fault=None, moment="", disk_is_full=False, verdicts=verdicts)

    def _check_prompt(self, number: int, entry_id: str) -> None:
        """An answer to what this ticket stands for, retries and all; what nobody asked for says nothing of prompts."""
        if entry_id in self.answered:
            assert self.answered[entry_id] == self.world.row_of(number)

    @staticmethod
    def _some_of(numbers: list[int], pick: int, count: int = 1) -> list[int]:
        first = pick % len(numbers) if numbers else 0
        return numbers[first : first + count]


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
