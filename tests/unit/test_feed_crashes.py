"""The promise of the feed, against anything in any order: every ticket ends exactly once in the surviving lineage.

The model beside the feed is the list of tickets that were trained, as a checkpoint would hold the weights: a crash cuts
it back to the last commit.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.ledger import TRAINED
from learner.plan import Kind, Plan
from streamrl.errors import TransportError
from tests.feed_world import FeedWorld, encode_answer, encode_failure, make_config
from tests.helpers import make_ticket

NUM_PROMPTS = 7
NUM_TICKETS = 2 * NUM_PROMPTS
some_ticket = st.integers(0, NUM_TICKETS + 2)


class Crashes(RuleBasedStateMachine):
    @initialize(groups_per_step=st.integers(1, 3), max_lag=st.integers(0, 2))
    def begin(self, groups_per_step: int, max_lag: int) -> None:
        config = make_config(
            training={"groups_per_step": groups_per_step, "max_epochs": 2},
            lag={"max_steps": max_lag},
            worker={"max_attempts": 2},
            learner={"idle_timeout_s": 1e9},
        )
        self.world = FeedWorld(config, num_prompts=NUM_PROMPTS)
        self.trained: list[int] = []
        self.committed: list[int] = []
        self.plan_in_work: Plan | None = None

    # Workers, and whoever else may write

    @rule(pick=st.integers(0, 100), zero_variance=st.booleans())
    def deliver(self, pick: int, zero_variance: bool) -> None:
        if waiting := sorted(self.world.tickets()):
            rewards = (1.0, 1.0) if zero_variance else (0.0, 1.0)
            self.world.answer(waiting[pick % len(waiting)], rewards=rewards)

    @rule(pick=st.integers(0, 100))
    def report_failure(self, pick: int) -> None:
        if waiting := sorted(self.world.tickets()):
            self.world.fail(waiting[pick % len(waiting)])

    @rule(number=some_ticket)
    def deliver_unasked(self, number: int) -> None:
        header, body = encode_answer(make_ticket(number))
        self.world.forge(number, header=header, body=body)

    @rule(number=some_ticket, failed=st.booleans())
    def forge(self, number: int, failed: bool) -> None:
        self.world.forge(number, header=encode_failure(make_ticket(number))[0] if failed else b"rubbish")

    @rule(pick=st.integers(0, 100))
    def lose_a_ticket(self, pick: int) -> None:
        if waiting := sorted(self.world.tickets()):
            del self.world.server.tickets["train"][self.world.ticket_id(waiting[pick % len(waiting)])]

    @rule()
    def lose_everything(self) -> None:
        self.world.server.flush()

    # The learner

    @precondition(lambda self: self.plan_in_work is None)
    @rule(long=st.booleans(), fault=st.sampled_from([None, "issue", "dead", "restore", "delete_tickets"]),
          moment=st.sampled_from(["before", "after"]))  # fmt: skip
    def plan(self, long: bool, fault: str | None, moment: str) -> None:
        def strike(point: str) -> None:
            if point == f"{fault}:{moment}":
                raise TransportError("the connection was lost")

        self.world.server.fault = strike
        try:
            plan = self.world.plan(timeout_s=130.0 if long else 0.0)
        except TransportError:
            plan = None
        self.world.server.fault = lambda point: None
        if plan is not None and plan.kind is Kind.STEP:
            assert 0 < len(plan.entries) <= self.world.config.training.groups_per_step
            self.plan_in_work = plan

    @precondition(lambda self: self.plan_in_work is not None)
    @rule(verdicts=st.lists(st.booleans(), min_size=3, max_size=3))
    def settle(self, verdicts: list[bool]) -> None:
        plan, self.plan_in_work = self.plan_in_work, None
        assert plan is not None
        self.trained += [entry.ticket for entry, sound in zip(plan.entries, verdicts, strict=False) if sound]
        self.world.train(plan, verdicts[: len(plan.entries)])

    @rule(told=st.booleans())
    def commit(self, told: bool) -> None:
        """A checkpoint; a crash in between may lose its trim of the stream."""
        self.world.commit(told=told)
        self.committed = list(self.trained)

    @rule()
    def crash(self) -> None:
        self.trained, self.plan_in_work = list(self.committed), None
        self.world.start()

    @invariant()
    def no_ticket_is_trained_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))

    @invariant()
    def the_books_balance(self) -> None:
        m = self.world.feed.metrics()
        ended = m["stream/groups_trained"] + m["stream/groups_dropped"] + m["stream/dead"]
        assert m["stream/issued"] == ended + m["stream/outstanding"]
        assert m["stream/groups_trained"] == len(self.trained)
        assert m["stream/issued"] <= NUM_TICKETS

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
        if self.plan_in_work is not None:
            self.settle([True, True, True])
        self.trained += self.world.run_to_end()
        self.no_ticket_is_trained_twice()
        self.the_books_balance()
        metrics = self.world.feed.metrics()
        assert metrics["stream/issued"] == NUM_TICKETS
        assert metrics["stream/outstanding"] == 0
        ledger = self.world.feed.state().ledger
        assert (ledger.watermark, ledger.exceptions) == (NUM_TICKETS, ())


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
