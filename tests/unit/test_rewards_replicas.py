"""Which replica is asked, when one is left out, and when it is tried again; time is a number here."""

from __future__ import annotations

import asyncio
import contextlib

from streamrl.workers.rewards.http_request import TryAgain
from streamrl.workers.rewards.replicas import FAILURES_TO_OPEN, Replica, Replicas


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(*urls: str, clock: Clock | None = None) -> Replicas:
    return Replicas(urls, first_pause_s=1.0, clock=clock or Clock())


def chosen(replicas: Replicas) -> Replica:
    replica = replicas.choose()
    assert replica is not None
    return replica


def fail(replicas: Replicas, replica: Replica) -> None:
    with contextlib.suppress(TryAgain), replicas.asking(replica):
        raise TryAgain("down")


def put_out(replicas: Replicas, count: int = FAILURES_TO_OPEN) -> None:
    for _ in range(count):
        fail(replicas, chosen(replicas))


def test_the_least_busy_one_is_asked() -> None:
    replicas = make("a", "b", "c")
    assert {chosen(replicas).url for _ in range(3)} == {"a", "b", "c"}


def test_another_than_the_one_that_failed_is_asked_where_there_is_one() -> None:
    replicas = make("a", "b")
    first = chosen(replicas)
    fail(replicas, first)
    second = replicas.choose(avoid=first)
    assert second is not None
    assert second is not first
    alone = make("a")
    assert alone.choose(avoid=chosen(alone)) is not None


def test_one_that_fails_again_and_again_is_left_out_and_then_tried_by_a_single_request() -> None:
    clock = Clock()
    replicas = make("a", "b", clock=clock)
    bad = chosen(replicas)
    fail(replicas, bad)
    for _ in range(FAILURES_TO_OPEN - 1):
        bad.in_flight += 1
        fail(replicas, bad)
    assert replicas.num_well == 1
    assert all(chosen(replicas) is not bad for _ in range(10))
    clock.now += 2.0
    assert chosen(replicas) is bad
    assert bad.on_trial
    assert all(chosen(replicas) is not bad for _ in range(10))
    with replicas.asking(bad):
        pass
    assert replicas.num_well == 2


def test_when_none_is_well_it_is_an_outage_until_one_may_be_tried() -> None:
    clock = Clock()
    replicas = make("a", clock=clock)
    put_out(replicas)
    assert replicas.outage == "a: down"
    assert replicas.choose() is None
    clock.now += replicas.pause_s()
    assert replicas.outage is None
    trial = chosen(replicas)
    assert replicas.outage == "a: down"
    with replicas.asking(trial):
        pass
    assert replicas.outage is None


def test_the_pause_grows_with_every_failed_trial_and_not_with_the_crowd_that_failed_at_once() -> None:
    clock = Clock()
    replicas = make("a", clock=clock)
    crowd = [chosen(replicas) for _ in range(100)]
    for replica in crowd:
        fail(replicas, replica)
    assert replicas.pause_s() <= 1.0
    pauses = []
    for _ in range(10):
        clock.now += 60.0
        fail(replicas, chosen(replicas))
        pauses.append(replicas.pause_s())
    assert pauses[3] > 4.0
    assert 15.0 <= max(pauses) <= 30.0


def test_a_request_that_nobody_waits_for_says_nothing_of_its_replica() -> None:
    replicas = make("a")
    for _ in range(FAILURES_TO_OPEN * 2):
        with contextlib.suppress(asyncio.CancelledError), replicas.asking(chosen(replicas)):
            raise asyncio.CancelledError
    assert replicas.num_well == 1
