"""The threads beside the loop, and what a rank knows of itself."""

from __future__ import annotations

import threading

import pytest

from streamrl.errors import Fenced
from streamrl.learner.admission.server import holder_name
from streamrl.learner.admission.start import Start
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.learner.process.watchdog import Watchdog
from streamrl.versions import make_version
from tests.feed_world import Clock
from tests.helpers import wait_until


def make_watchdog(limit_s: float, clock: Clock, stalled: threading.Event) -> Watchdog:
    return Watchdog(
        limit_s=limit_s, at_disk_s=600.0, clock=clock, check_every_s=0.01, on_stall=lambda _reason: stalled.set()
    )


def test_a_loop_that_stands_still_is_ended() -> None:
    clock, stalled = Clock(), threading.Event()
    watchdog = make_watchdog(60.0, clock, stalled)
    with watchdog.watching():
        clock.advance(59.0)
        watchdog.beat()
        clock.advance(59.0)
        assert not stalled.wait(0.05)
        clock.advance(2.0)
        wait_until(stalled.is_set, description="the watchdog")


def test_a_micro_batch_that_takes_many_times_as_long_as_any_before_is_ended_before_the_limit() -> None:
    clock, stalled = Clock(), threading.Event()
    watchdog = Watchdog(
        limit_s=300.0, at_disk_s=600.0, clock=clock, check_every_s=0.01, on_stall=lambda _reason: stalled.set()
    )
    with watchdog.watching():
        with watchdog.computing():
            for _ in range(12):
                clock.advance(4.0)
                watchdog.beat()
        clock.advance(200.0)  # whoever waits for Redis, or for a peer that does, has the whole limit
        assert not stalled.wait(0.05)
        with watchdog.computing():
            clock.advance(79.0)
            assert not stalled.wait(0.05)
            clock.advance(2.0)
            wait_until(stalled.is_set, description="the watchdog")


def test_a_loop_that_stood_still_because_the_whole_process_did_gets_time_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stalled = Clock(), threading.Event()
    monkeypatch.setattr("streamrl.learner.process.watchdog._LATE_S", -60.0)  # each check counts as late
    watchdog = make_watchdog(60.0, clock, stalled)
    with watchdog.watching():
        clock.advance(3600.0)
        assert not stalled.wait(0.2)
        monkeypatch.undo()
        clock.advance(61.0)
        wait_until(stalled.is_set, description="the watchdog")


@pytest.mark.parametrize(
    ("micro_batch_s", "num_seen", "bound_s"), [(0.1, 12, 60.0), (0.1, 3, 300.0), (100.0, 12, 300.0)]
)
def test_what_a_micro_batch_may_take_has_a_floor_a_roof_and_a_beginning(
    micro_batch_s: float, num_seen: int, bound_s: float
) -> None:
    clock, stalled = Clock(), threading.Event()
    watchdog = Watchdog(
        limit_s=300.0, at_disk_s=600.0, clock=clock, check_every_s=0.01, on_stall=lambda _reason: stalled.set()
    )
    with watchdog.watching():
        with watchdog.computing():
            for _ in range(num_seen):
                clock.advance(micro_batch_s)
                watchdog.beat()
        with watchdog.computing():
            clock.advance(bound_s - 1)
            assert not stalled.wait(0.05)
            clock.advance(2)
            wait_until(stalled.is_set, description="the watchdog")


def test_a_policy_that_compiles_after_many_quick_micro_batches_of_a_reference_has_the_whole_limit_for_it() -> None:
    clock, stalled = Clock(), threading.Event()
    watchdog = make_watchdog(300.0, clock, stalled)
    with watchdog.watching():
        with watchdog.computing():
            for _ in range(12):
                clock.advance(0.1)
                watchdog.beat()
            clock.advance(299.0)
            assert not stalled.wait(0.05)
            watchdog.beat()
            clock.advance(299.0)  # its optimizer's first step
            assert not stalled.wait(0.05)
        clock.advance(299.0)
        assert not stalled.wait(0.05)


def test_at_the_disk_the_loop_may_stand_still_for_longer_and_not_for_ever() -> None:
    clock, stalled = Clock(), threading.Event()
    watchdog = make_watchdog(60.0, clock, stalled)
    with watchdog.watching():
        with watchdog.at_disk():
            clock.advance(599.0)
            assert not stalled.wait(0.05)
        clock.advance(59.0)  # the loop's time begins when it is back
        assert not stalled.wait(0.05)
        with watchdog.at_disk():
            clock.advance(601.0)
            wait_until(stalled.is_set, description="the watchdog")


def test_the_lease_is_renewed_until_the_block_ends() -> None:
    renewals: list[str] = []
    keeper = LeaseKeeper(lambda: renewals.append("before the term"), lease_s=0.04)
    with keeper.keeping():
        wait_until(lambda: renewals, description="a renewal")
        keeper.renew_with(lambda: renewals.append("fenced"))
        wait_until(lambda: "fenced" in renewals, description="a fenced renewal")
    keeper.check()
    count = len(renewals)
    assert not threading.Event().wait(0.05)
    assert len(renewals) == count


def test_a_lost_lease_reaches_the_loop() -> None:
    def refuse() -> None:
        raise Fenced("another learner")

    def is_lost() -> bool:
        try:
            keeper.check()
        except Fenced:
            return True
        return False

    keeper = LeaseKeeper(refuse, lease_s=0.04)
    with keeper.keeping():
        wait_until(is_lost, description="the loss")


@pytest.mark.parametrize(
    ("environment", "named_by_parent"), [({"TORCHELASTIC_RUN_ID": "none"}, True), ({"TORCHELASTIC_RUN_ID": ""}, True)]
)
def test_a_torchrun_without_an_id_is_named_by_its_agent(environment: dict[str, str], named_by_parent: bool) -> None:
    assert holder_name(environment) == holder_name(environment)
    assert (holder_name(environment) != holder_name({})) is named_by_parent


def test_restarts_by_one_torchrun_are_one_holder() -> None:
    assert holder_name({"TORCHELASTIC_RUN_ID": "abc"}) == "abc"


def test_tokens_of_a_branch_that_was_given_up_are_dead() -> None:
    start = Start(
        run_uid="run",
        term=3,
        checkpoint=CheckpointName(1, 20),
        lineage={3: None, 1: 20},  # term 2 never wrote what 3 went on from
        step=20,
        first_step=10,
        consumed_samples=7,
        total_steps=100,
        steps_of_data=100,
        canary_ids=(3, 4, 1),
    )
    assert Start.from_bytes(start.to_bytes()) == start
    dead = [start.is_dead(make_version(term, 0), step) for term, step in ((3, 25), (1, 20), (1, 21), (2, 5))]
    assert dead == [False, False, True, True]


def test_timers_add_up_and_begin_anew() -> None:
    timers = Timers()
    timers.add("publish", 1.0)
    timers.add("publish", 2.0)
    assert timers.take() == {"timers/publish": 3.0}
    assert timers.take() == {}
