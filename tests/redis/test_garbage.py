"""Under a run's keys lies what another program wrote: monitors show all the rest, and say what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

import pytest
import redis
import redis.asyncio

from streamrl.ops.cli.main import main
from streamrl.ops.monitor.poller import Watcher
from streamrl.ops.monitor.text import status_lines, why_lines
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import Screen
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from tests.redis.monitor_world import Watched, healthy_run
from tests.redis.run_world import RunWorld

GARBAGE = (b"", b"abc", b"\xff\xfe", b"nan", b"-inf", b"1e999", b"9" * 400, b"9" * 5000, b"1_0\x00", b"null", b"[1]")
GARBAGE_JSON = (*GARBAGE, b'{"a": {"b": 1}}', b'{"a": "b"}', b'{"a": NaN}', b'{"a": ' + b"9" * 400 + b"}", b"[" * 9999)
NUMBERS = (
    *product(("meta",), ("term", "step", "created_at")),
    *product(("weights",), ("latest", "step", "at")),
)
TEXTS = (("meta", "config"), ("meta", "state"), ("control", "mode"), ("progress", "worker/odd"))


@pytest.fixture
async def run(
    tmp_path_factory: pytest.TempPathFactory,
    client: redis.Redis,
    async_client: redis.asyncio.Redis,
    keys: Keys,
    redis_url: str,
) -> Watched:
    folder = tmp_path_factory.mktemp("run")
    made = await healthy_run(RunWorld(folder, client=client, async_client=async_client, keys=keys, url=redis_url))
    client.hset(keys.weights, mapping={"latest": 1 << 32, "step": 0, "at": 1.0})
    return made


def look(run: Watched) -> View:
    """Whatever shows a run shows this one."""
    watcher = Watcher(run.world.client, run.world.keys, server="here")
    view = watcher.look()
    assert status_lines(view)
    assert why_lines(view)
    assert draw(view, Screen(), width=120, height=40)
    json.dumps(view.to_json(), allow_nan=False)
    return view


def garbled(run: Watched) -> Iterator[tuple[str, bytes]]:
    """Each hash with each kind of garbage in each of its fields, one at a time."""
    client, prefix = run.world.client, run.world.keys.prefix
    for (name, field), value in product((*NUMBERS, *TEXTS), GARBAGE_JSON):
        key, before = f"{prefix}{name}", client.hget(f"{prefix}{name}", field)
        client.hset(key, field, value)
        yield f"{name} {field}", value
        client.hdel(key, field) if before is None else client.hset(key, field, before)


async def test_a_field_that_cannot_be_read_is_named_and_hides_nothing_else(run: Watched) -> None:
    sound = look(run)
    assert (sound.unreadable, sound.causes) == ((), ())
    for where, value in garbled(run):
        view = look(run)
        assert [worker.part.name for worker in view.workers] == ["worker/w"], (where, value)
        assert view.learner.metrics, (where, value)
        if where in {" ".join(one) for one in NUMBERS}:
            assert [one.partition(" =")[0] for one in view.unreadable] == [where], value
            assert "unreadable" in [cause.name for cause in view.causes]
        elif where == "progress worker/odd":
            assert view.unreadable == ("1 of 3 reports",)
    assert look(run).unreadable == ()


async def test_records_and_events_that_cannot_be_read_are_counted_and_the_others_shown(run: Watched) -> None:
    client, keys = run.world.client, run.world.keys
    stamp = {b"term": b"1", b"at": b"1.0"}
    record, event = {**stamp, b"step": b"9", b"values": b'{"a": 1}'}, {**stamp, b"kind": b"x", b"detail": b"{}"}
    run.world.learner.stream.event("sound")
    before = look(run)
    for field, value in product(record, GARBAGE_JSON):
        for stream in (keys.metrics, keys.thinned(1), keys.validations):
            client.xadd(stream, {**record, field: value})
    for field, value in product((b"term", b"at"), GARBAGE):
        client.xadd(keys.events, {**event, field: value})
    client.xadd(keys.events, {**event, b"detail": b"[" * 9999})
    client.xadd(keys.events, {"another": "schema"})
    after = look(run)
    assert (after.learner.metrics, after.run.step) == (before.learner.metrics, before.run.step)
    num_records, num_events = 4 * len(GARBAGE_JSON), 2 * len(GARBAGE) + 2
    seen = snapshot(client, keys, num_records=num_records + 1, num_events=num_events + 1)
    assert (len(seen.records), len(seen.events)) == (1, 1)
    assert seen.unreadable == (
        f"{num_records} of {num_records + 1} records of metrics",
        f"{num_events} of {num_events + 1} events",
    )


async def test_curves_go_on_after_what_cannot_be_read(run: Watched) -> None:
    watcher = Watcher(run.world.client, run.world.keys, server="here")
    watcher.look()
    for _ in range(1200):
        run.world.client.xadd(run.world.keys.metrics, {"step": "x"})
    run.world.learner.step += 1
    run.record()
    steps = [watcher.look().run.step for _ in range(4)]
    assert steps[-1] == run.world.learner.step


async def test_a_key_of_another_type_is_named_and_hides_nothing_else(run: Watched) -> None:
    client, keys = run.world.client, run.world.keys
    looked_at = ("metrics", "events", "weights", "dead", "manifests", "retry-requests", "control", "lease")
    for name in (*looked_at, "tickets:train", "groups:train", "metrics:validation"):
        key, aside = f"{keys.prefix}{name}", f"{keys.prefix}aside"
        there = client.exists(key)
        if there:
            client.rename(key, aside)
        client.sadd(key, "x")
        view = look(run)
        assert [worker.part.name for worker in view.workers] == ["worker/w"]
        if name != "metrics:validation":
            assert view.unreadable == (f"{name}: of another type",)
        client.delete(key)
        if there:
            client.rename(aside, key)
    assert look(run).unreadable == ()


async def test_the_commands_say_it_too(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run.world.client.hset(run.world.keys.meta, "created_at", "yesterday")
    target = ["--redis", run.world.url, "--run", run.world.keys.name]
    capsys.readouterr()
    assert main(["status", *target]) == 3
    assert "worker" in capsys.readouterr().out
    assert main(["why", *target]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "! something in Redis cannot be read seen meta created_at = 'yesterday'; everything else is shown" in told
