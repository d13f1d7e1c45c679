"""Workers by the tickets that wait: what a cluster makes of our exporter's figures, by a clock of the test's own."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import generate_latest

from streamrl.ops.monitor.exporter import make_registry
from streamrl.ops.monitor.poller import LatestView
from tests.manifest_world import render
from tests.redis.monitor_world import Watched
from tests.scaling_world import SYNC_S, Autoscaler, Keda, metric

ENDED = -1  # in the place of a number of tickets
DAY_S = 24 * 3600
MINUTE_S = 60

# (minutes, tickets that wait, how far they go up and down): a learner at work, one that is slow, a step without any
# ticket, validation at once, a night of little, and a full stream to the end.
DAY = ((90, 256, 30), (120, 96, 12), (4, 0, 0), (60, 96, 12), (30, 256, 0), (600, 40, 8), (506, 256, 60))
TURNS = 5  # of that load: up, down, up, down, up, down; the step of four minutes is none


class Load:
    """Tickets in the stream of a live run, and what its exporter says."""

    def __init__(self, run: Watched) -> None:
        self._run = run
        self._count = -1
        self._text = ""

    def has(self, tickets: int) -> str:
        if tickets != self._count:
            self._fill(tickets)
            seen = LatestView(view=self._run.view())
            self._text = generate_latest(make_registry(self._run.world.keys.name, lambda: seen)).decode()
            self._count = tickets
        return self._text

    def _fill(self, tickets: int) -> None:
        client, stream = self._run.world.client, self._run.world.keys.tickets("train")
        if tickets == ENDED:
            self._run.world.learner.stream.release("stopped")
            return
        missing = tickets - client.xlen(stream)
        with client.pipeline(transaction=False) as pipe:
            for _ in range(missing):
                pipe.xadd(stream, {"ticket": b"one that nobody reads"})
            pipe.execute()
        if missing < 0:
            client.xtrim(stream, maxlen=tickets, approximate=False)


@pytest.fixture
def load(run: Watched) -> Load:
    assert run.world.learner.plan() is None, "its first tickets are asked for"
    return Load(run)


def keda() -> Keda:
    return Keda(render("cpu").named("ScaledObject", "worker")["spec"])


def scale(
    keda: Keda, tickets: Callable[[float], str], *, until_s: float, replicas: int = 0, offset_s: float = 0.0
) -> Iterator[tuple[float, int]]:
    """(second, workers) at each that has a poll or a sync, of which the latter come `offset_s` after the former."""
    value_of = functools.cache(keda.value)
    polls = ((at * keda.period_s, 0) for at in itertools.count())
    syncs = ((at * SYNC_S + offset_s, 1) for at in itertools.count())
    for now, is_sync in itertools.takewhile(lambda at: at[0] <= until_s, merged(polls, syncs)):
        value = value_of(tickets(now))
        replicas = keda.autoscaler.sync(now, replicas, value) if is_sync else keda.poll(now, replicas, value)
        yield now, replicas


def merged(*times: Iterator[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    ahead = [next(each) for each in times]
    while True:
        first = ahead.index(min(ahead))
        yield ahead[first]
        ahead[first] = next(times[first])


@pytest.mark.parametrize("offset_s", [0.0, 7.0, 14.9])
@pytest.mark.parametrize("begins_s", [0.1, 14.9])
def test_eight_workers_are_there_two_polls_after_a_backlog(load: Load, offset_s: float, begins_s: float) -> None:
    full, ended, scaler = load.has(256), load.has(ENDED), keda()
    until_s = begins_s + 2 * scaler.period_s
    history = scale(scaler, lambda now: full if now >= begins_s else ended, until_s=until_s, offset_s=offset_s)
    assert list(history)[-1][1] == 8


@pytest.mark.parametrize("offset_s", [0.0, 7.0, 14.9])
@pytest.mark.parametrize("ends_s", [600.1, 607.0, 614.9])
def test_no_worker_is_left_a_minute_after_the_run_ended(load: Load, offset_s: float, ends_s: float) -> None:
    """Also of one that was told to stop, whose tickets stay for when it goes on."""
    full = load.has(256)
    over = load.has(ENDED)
    assert metric(over, 'streamrl_tickets{purpose="train"}') == 256
    history = dict(scale(keda(), lambda now: full if now < ends_s else over, until_s=ends_s + 60, offset_s=offset_s))
    assert history[600.0] == 8
    assert list(history.values())[-1] == 0


def test_a_day_of_load_turns_no_more_often_than_the_load_does(
    load: Load, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(1)
    minutes = [max(0, tickets + chance.randint(-noise, noise)) for length, tickets, noise in DAY for _ in range(length)]
    texts = [load.has(tickets) for tickets in minutes[: DAY_S // MINUTE_S - 30]]
    texts += [load.has(ENDED)] * 30
    history = list(scale(keda(), lambda now: texts[int(now // MINUTE_S)], until_s=DAY_S - 1, offset_s=7.0))
    changes = [(at, after - before) for (_, before), (at, after) in itertools.pairwise(history) if after != before]
    turns = sum(one > 0 > other or one < 0 < other for (_, one), (_, other) in itertools.pairwise(changes))
    spent = sum(count for _, count in history) / len(history)
    record_property("figure", f"a day: {len(changes)} changes, {turns} turns, {spent:.1f} workers on average")
    assert history[-1][1] == 0
    assert min(count for at, count in history if 60 < at < DAY_S - 1800) >= 1, "a step without tickets keeps workers"
    assert turns == TURNS


def test_where_the_exporter_has_not_seen_redis_nothing_is_scaled(load: Load) -> None:
    blind = generate_latest(make_registry("x", lambda: LatestView(error="it is gone"))).decode()
    assert keda().value(blind) is None
    assert {count for _, count in scale(keda(), lambda now: blind, until_s=3600, replicas=3)} == {3}


def test_the_other_autoscaler_has_eight_two_scrapes_after_a_backlog_and_does_not_flap(load: Load) -> None:
    spec = render("gpu-large").named("HorizontalPodAutoscaler", "worker")["spec"]
    external = spec["metrics"][0]["external"]
    (label, value), *_ = external["metric"]["selector"]["matchLabels"].items()
    told = f'{external["metric"]["name"]}{{{label}="{value}"}}'
    scaler = Autoscaler(
        most=spec["maxReplicas"],
        target=float(external["target"]["averageValue"]),
        behavior=spec["behavior"],
    )
    full, little = (metric(load.has(tickets), told) for tickets in (256, 40))
    assert scaler.sync(15.0, 1, full) == 8
    counts = [scaler.sync(15.0 * at, 8, full if at % 8 else little) for at in range(2, 200)]
    assert set(counts) == {8}
