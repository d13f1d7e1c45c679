"""What may happen to a run, in any order: each rule is one action of one party, and what it may meet."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from streamrl.crashpoints import Point
from streamrl.errors import TransportError
from streamrl.learner.checkpoints.terms import known_run
from streamrl.learner.groups.plan import Kind
from streamrl.protocol.transport.lease import await_lease
from streamrl.protocol.transport.operator import purge, read_letters, request_retries
from tests.feed_world import encode_answer, encode_failure, make_config
from tests.helpers import make_ticket
from tests.redis.disaster_learner import Life
from tests.redis.disaster_site import LEASE_S, SAFE, Peril, Site
from tests.redis.disaster_workers import encode
from tests.redis.disaster_world import DisasterWorld

GROUP = sum(len(part) for part in encode_answer(make_ticket(0)))

STARTING: tuple[Point, ...] = ("lease.taken", "run.recorded", "term.recorded", "claim.written", "announce.written")
PLANNING: tuple[Point, ...] = (
    "restore.written", "reconcile.deleted", "reconcile.counted", "draws.written", "issue.counted", "issue.written",
    "dead.written", "letters.removed", "retry.counted", "group.read",
)  # fmt: skip
TRAINING: tuple[Point, ...] = ("group.settled", "announce.written")
COMMITTING: tuple[Point, ...] = (
    "file.aside", "file.linked", "file.renamed", "checkpoint.written", "checkpoint.synced", "journal.written",
    "checkpoint.sealed", "checkpoint.renamed", "checkpoint.committed", "commit.written", "prune.aside", "prune.removed",
)  # fmt: skip
WORKING: tuple[Point, ...] = (
    "ticket.leased", "ticket.renewed", "group.ready", "group.delivered", "ticket.handed_back", "worker.left",
)  # fmt: skip
POINTS = frozenset({*STARTING, *PLANNING, *TRAINING, *COMMITTING, *WORKING})


def perils(points: tuple[Point, ...]) -> st.SearchStrategy[Peril]:
    """Mostly none."""
    death = st.builds(Peril, dies_at=st.sampled_from(points))
    lost_reply = st.builds(Peril, loses_reply=st.integers(1, 5))
    return st.one_of(st.just(SAFE), st.just(SAFE), st.just(SAFE), death, death, lost_reply)


some_hand = st.integers(0, 2)
# Hypothesis leaves rules out of a run as it likes, and without plans a run shows little; so others may go on to one.
then_go_on = st.none() | st.tuples(perils(PLANNING), perils(TRAINING))  # what it and its step meet
Going = tuple[Peril, Peril]


def ask_for_a_plan(life: Life) -> None:
    """As any learner does: not while it has one in work."""
    if life.plan_in_work is None:
        plan = life.feed.plan(step=life.step, world_size=1, timeout_s=0.0)
        life.plan_in_work = plan if plan is not None and plan.kind is Kind.STEP else None


def reconcile(life: Life) -> None:
    """Likewise."""
    if life.plan_in_work is None:
        life.feed.reconcile(step=life.step)


ZOMBIE_ACTS = {
    "plan": ask_for_a_plan,
    "reconcile": reconcile,
    "renew": lambda life: life.stream.renew(),
    "commit": lambda life: life.commit(),
    "publish": lambda life: life.publish(),
    "release": lambda life: life.stream.release("stopped"),
}


class AnyOrder(RuleBasedStateMachine):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.world: DisasterWorld | None = None

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_lag=st.integers(0, 2),
        stale=st.sampled_from(["keep", "mask", "wait", "drop"]),
        budget=st.sampled_from([1, 5, 1000]),
        max_attempts=st.integers(1, 2),
        clock_is_ahead=st.booleans(),
        curriculum=st.booleans(),
    )
    def begin(
        self,
        groups_per_step: int,
        max_lag: int,
        stale: str,
        budget: int,
        max_attempts: int,
        clock_is_ahead: bool,
        curriculum: bool,
    ) -> None:
        config = make_config(
            data={"curriculum": curriculum},
            redis={"max_backlog_bytes": budget * GROUP},
            training={"groups_per_step": groups_per_step, "max_epochs": 2},
            lag={"max_steps": max_lag, "stale": stale},
            worker={"max_attempts": max_attempts},
            learner={"idle_timeout_s": 1e9},
        )
        self.world = DisasterWorld(self.site, config, clock_is_ahead=clock_is_ahead)

    # Workers

    @rule(who=some_hand, count=st.integers(1, 4), peril=perils(("ticket.leased",)), then=then_go_on)
    def lease(self, who: int, count: int, peril: Peril, then: Going | None) -> None:
        self.world.workers.lease(who, count, peril)
        self._go_on(then)

    @rule(who=some_hand, count=st.integers(1, 4), kind=st.sampled_from(["good", "good", "good", "dull", "failed"]),
          peril=perils(("group.ready", "group.delivered")), then=then_go_on)  # fmt: skip
    def answer(self, who: int, count: int, kind: str, peril: Peril, then: Going | None) -> None:
        hand = self.world.workers.hand(who)
        if not hand.held:
            self.world.workers.lease(who, count, SAFE)
        for leased in hand.held[:count]:
            self.world.workers.deliver(who, leased, encode(leased, kind), peril)
            if self.world.workers.hands.get(who) is not hand:
                break
        self._go_on(then)

    @rule(who=some_hand, kind=st.sampled_from(["good", "dull", "failed", "failed"]), peril=perils(PLANNING))
    def answer_all_and_plan(self, who: int, kind: str, peril: Peril) -> None:
        self.world.workers.lease(who, 8, SAFE)
        self.answer(who, 8, kind, SAFE, None)
        self.plan(peril, True, True)

    @precondition(lambda self: self.world.workers.late)
    @rule(pick=st.integers(0, 100))
    def deliver_late_or_twice(self, pick: int) -> None:
        self.world.workers.deliver_late(pick)

    @rule(who=some_hand, peril=perils(("ticket.renewed",)))
    def renew_leases(self, who: int, peril: Peril) -> None:
        self.world.workers.renew_leases(who, peril)

    @rule(who=some_hand, dies=st.booleans())
    def let_leases_lapse(self, who: int, dies: bool) -> None:
        self.world.workers.lapse(who)
        if dies:
            del self.world.workers.hands[who]

    @rule(who=some_hand, leaves=st.booleans(), peril=perils(("ticket.handed_back", "worker.left")))
    def hand_back(self, who: int, leaves: bool, peril: Peril) -> None:
        hand = self.world.workers.hand(who)
        if not hand.held:
            self.world.workers.lease(who, 2, SAFE)
        self.world.workers.late += [(hand.stream, leased) for leased in hand.held]
        held, hand.held = hand.held, []
        self.world.workers.work(who, peril, hand.stream.leave() if leaves else hand.stream.hand_back(held))

    # Whoever else may write, and what Redis may lose

    @precondition(lambda self: self.world.life is not None)
    @rule(pick=st.integers(0, 100), kind=st.sampled_from(["rubbish", "failure", "unasked", "foreign", "nothing"]))
    def forge(self, pick: int, kind: str) -> None:
        life = self.world.life
        number = pick % max(1, life.feed.state().ledger.issued)
        ticket = make_ticket(number, run_uid=life.uid)
        header, body = encode_failure(ticket) if kind == "failure" else encode_answer(ticket)
        fields = {"n": str(number), "u": "another" if kind == "foreign" else life.uid}
        fields |= {"h": b"rubbish" if kind == "rubbish" else header, "b": body}
        stream = self.world.keys.groups("train")
        if life.feed.state().ledger.issued and kind != "unasked":
            self.world.client.xadd(stream, {"what": "ever"} if kind == "nothing" else fields)

    @rule(kind=st.sampled_from(["flush", "fail over", "fail over", "fail over"]), back=st.integers(0, 7),
          then=then_go_on)  # fmt: skip
    def redis_loses_data(self, kind: str, back: int, then: Going | None) -> None:
        self.world.lose(kind, back)
        self._go_on(then)

    @rule(which=st.sampled_from(["tickets", "groups"]), then=then_go_on)
    def a_stream_is_removed(self, which: str, then: Going | None) -> None:
        keys = self.world.keys
        self.world.lose(keys.tickets("train") if which == "tickets" else keys.groups("train"), 0)
        self._go_on(then)

    @rule(seconds=st.sampled_from([61.0, 601.0]), then=then_go_on)
    def time_passes(self, seconds: float, then: Going | None) -> None:
        self.world.clock.advance(seconds)
        self._go_on(then)

    # The learner

    @rule(peril=perils(PLANNING), notices=st.booleans(), trains=st.booleans(), in_training=perils(TRAINING))
    def plan(self, peril: Peril, notices: bool, trains: bool, in_training: Peril = SAFE) -> None:
        if self.world.life is None:
            self.world.start(SAFE)
        if self.world.life.plan_in_work is None:
            self.world.plan(peril, notices=notices)
        if trains:
            self._train(in_training)

    @precondition(lambda self: self.world.life is not None and self.world.life.plan_in_work is not None)
    @rule(peril=perils(TRAINING), finite=st.sampled_from([True, True, True, False]))
    def train(self, peril: Peril, finite: bool) -> None:
        self.world.train(peril, finite=finite)

    @precondition(lambda self: self.world.life is not None and self.world.life.copied is None)
    @rule(then=then_go_on)
    def begin_a_checkpoint(self, then: Going | None) -> None:
        self.world.copy()
        self._go_on(then)

    @precondition(lambda self: self.world.life is not None)
    @rule(peril=perils(COMMITTING), told=st.sampled_from([True, True, True, False]))
    def commit(self, peril: Peril, told: bool) -> None:
        self.world.commit(peril, told=told)

    @precondition(lambda self: self.world.life is not None)
    @rule()
    def validate(self) -> None:
        self.world.validate()

    @rule(peril=perils(STARTING), then=then_go_on)
    def crash_and_start_again(self, peril: Peril, then: Going | None) -> None:
        self.world.learner_dies()
        self.world.start(peril)
        self._go_on(then)

    @rule(peril=perils(STARTING), holder=st.sampled_from(["job", "another job"]), then=then_go_on)
    def take_over(self, peril: Peril, holder: str, then: Going | None) -> None:
        """The learner before goes on for a while."""
        self.world.start(peril, holder=holder, takeover=True)
        self._go_on(then)

    @precondition(lambda self: self.world.zombies)
    @rule(pick=st.integers(0, 1), act=st.sampled_from(sorted(ZOMBIE_ACTS)))
    def a_zombie_acts(self, pick: int, act: str) -> None:
        zombie = self.world.zombies[pick % len(self.world.zombies)]
        self.world.zombie_acts(zombie, ZOMBIE_ACTS[act])

    @precondition(lambda self: self.world.client.exists(self.world.keys.lease))
    @rule()
    def a_stranger_is_refused(self) -> None:
        with pytest.raises(TransportError, match="holds its lease"):
            await_lease(
                self.world.client,
                self.world.keys,
                run_uid=partial(known_run, self.world.config.folder),
                holder="stranger",
                lease_s=LEASE_S,
                wait_s=0.0,
            )

    # The operator

    @rule(who=some_hand, pick=st.integers(0, 100), away=st.sampled_from([False, False, False, True]),
          peril=perils(("dead.written", "letters.removed", "retry.counted")))  # fmt: skip
    def treat_dead_letters(self, who: int, pick: int, away: bool, peril: Peril) -> None:
        client, keys = self.world.client, self.world.keys
        if not (letters := list(read_letters(client, keys))):
            self.answer_all_and_plan(who, "failed", peril)
            return
        chosen = [letters[pick % len(letters)]]
        purge(client, keys, chosen, by="test") if away else request_retries(client, keys, chosen, by="test")
        self.plan(peril, True, True)

    @invariant()
    def the_audit_holds(self) -> None:
        if self.world is not None:
            self.site.tally.steps += 1
            self.world.check()
            self.world.remember()

    def teardown(self) -> None:
        if self.world is not None and sys.exc_info()[0] is None:  # else what went wrong in a step is what matters
            self.world.finish()
            self.site.tally.replies_lost = self.site.client.luck.num_lost + self.site.async_client.luck.num_lost

    def _go_on(self, then: Going | None) -> None:
        if then is not None:
            planning, training = then
            self.plan(planning, True, True, training)

    def _train(self, peril: Peril) -> None:
        if self.world.life is not None and self.world.life.plan_in_work is not None:
            self.world.train(peril)
