"""Prometheus, alert rules and Grafana: names that agree, values that are those of the run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from streamrl.ops.cli.main import main
from streamrl.ops.monitor.alerts import alert_rules, grafana_dashboard
from streamrl.ops.monitor.exporter import make_registry, make_server
from streamrl.ops.monitor.poller import ConnectingWatcher, LatestView, Poller, Watcher
from streamrl.ops.monitor.runs import Target, find_target, opened
from streamrl.ops.monitor.view import View
from streamrl.process import address_of, bind, started_at
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.operator import set_control
from tests.helpers import wait_until
from tests.launch_world import make_view
from tests.redis.monitor_world import Watched
from tests.run_folders import make_folder
from tests.unit.test_remains import change_state

_LINE = re.compile(r'^([a-z_]+)\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)$')
_NAME = re.compile(r"streamrl_[a-z_]+")


def prometheus_text(view: View | None, run: str, *, is_up: bool) -> bytes:
    seen = LatestView(view=view, error="" if is_up else "it is gone")
    return generate_latest(make_registry(run, lambda: seen))


def parse(told: bytes) -> dict[tuple[str, str], float]:
    """Every sample by its name and labels; each must be a line of the format, and announced by a TYPE."""
    text = told.decode()
    announced = set(re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE))
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = _LINE.match(line)
            assert match, line
            assert match[1] in announced, line
            samples[match[1], match[2]] = float(match[3])
    return samples


async def test_the_text_has_the_run_in_prometheus_words(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record(**{"lag/mean": 1.5})
    run.world.learner.stream.record(run.world.learner.step, {"val_rollouts/rewards": 0.75})
    run.learner("train", state="working")
    run.worker(detail={"tokens_per_s": 80})
    name = run.world.keys.name
    found = parse(prometheus_text(run.view(), name, is_up=True))
    assert found["streamrl_up", f'run="{name}"'] == 1
    assert found["streamrl_health", f'run="{name}"'] == 0
    assert found["streamrl_metric", f'name="lag/mean",run="{name}"'] == 1.5
    assert found["streamrl_metric", f'name="val_rollouts/rewards",run="{name}"'] == 0.75
    assert found["streamrl_worker_tokens_per_second", f'run="{name}",worker="worker/w"'] == 80
    assert found["streamrl_workers", f'run="{name}",state="working"'] == 1
    assert found["streamrl_groups_trained_total", f'run="{name}"'] == 3


def test_a_worker_that_was_killed_has_no_speed_and_one_without_weights_no_lag(run: Watched) -> None:
    told = {"tokens_per_s": 80, "step": 1, "rewards/exact/failed": 2}
    run.worker(name="killed", ago_s=60, detail=told)
    run.worker(name="starts", detail={"rewards/exact/failed": 1})
    seen = run.view()
    assert "exact" in [source.name for source in seen.rewards]
    found = parse(prometheus_text(seen, "x", is_up=True))
    of_workers = {(name, labels) for name, labels in found if 'worker="' in labels}
    assert of_workers == {
        ("streamrl_worker_tokens_per_second", 'run="x",worker="worker/starts"'),
        ("streamrl_reward_errors_total", 'run="x",source="exact",worker="worker/starts"'),
    }
    assert found["streamrl_workers", 'run="x",state="silent"'] == 1


def test_counters_fall_only_with_the_process_or_the_run_that_they_are_of(run: Watched) -> None:
    run.worker()
    seen = run.view()

    def told(trained: int, *workers: tuple[str, int], uid: str = "one") -> dict[tuple[str, str], float]:
        nonlocal now
        drops = replace(seen.drops, trained=trained, by_reason={"stale": 2 * trained})
        named = [replace(seen.workers[0], part=replace(seen.workers[0].part, name=name)) for name, _ in workers]
        failing = zip(named, workers, strict=True)
        asking = tuple(replace(one, detail={"rewards/exact/failed": failed}) for one, (_, failed) in failing)
        now = replace(seen, run=replace(seen.run, uid=uid), drops=drops, workers=asking)
        return parse(generate_latest(registry))

    now = seen
    registry = make_registry("x", lambda: LatestView(view=now))

    told(100, ("worker/a", 7), ("worker/b", 1))
    after_a_crash = told(90, ("worker/b", 1))
    assert after_a_crash["streamrl_groups_trained_total", 'run="x"'] == 100
    assert after_a_crash["streamrl_groups_dropped_total", 'reason="stale",run="x"'] == 200
    assert after_a_crash["streamrl_reward_errors_total", 'run="x",source="exact",worker="worker/b"'] == 1
    assert told(3, uid="another")["streamrl_groups_trained_total", 'run="x"'] == 3


def test_names_from_other_machines_cannot_break_a_line(run: Watched) -> None:
    run.worker(name='evil"} 1\nstreamrl_up{x="\\')
    parse(prometheus_text(run.view(), "x", is_up=True))


def test_without_redis_only_that_is_told() -> None:
    assert parse(prometheus_text(None, "x", is_up=False)) == {("streamrl_up", 'run="x"'): 0.0}


def alerts() -> dict[str, str]:
    """What each looks at, by its name."""
    return {rule["alert"]: rule["expr"] for rule in alert_rules()["groups"][0]["rules"]}


def test_alerts_and_panels_ask_only_for_what_is_exported() -> None:
    exported = set(re.findall(r"^# TYPE (\S+)", prometheus_text(make_view(), "x", is_up=True).decode(), re.MULTILINE))
    expressions = list(alerts().values())
    expressions += [target["expr"] for panel in grafana_dashboard()["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in _NAME.findall(expression)}
    assert asked <= exported, asked - exported
    assert {"StreamrlStalled", "StreamrlLag", "StreamrlDrops", "StreamrlDeadLetters"} <= set(alerts())


@pytest.mark.parametrize("name", ["StreamrlStalled", "StreamrlNoProgress"])
def test_nobody_is_woken_for_a_pause(run: Watched, name: str) -> None:
    set_control(run.world.client, run.world.keys, "pause", by="the test")
    run.learner("resume", for_s=2000)
    run.worker("resume", state="waiting", for_s=2000)
    told = parse(prometheus_text(run.view(), "x", is_up=True))
    assert told["streamrl_health", 'run="x"'] == 4
    assert told["streamrl_learner_progress_age_seconds", 'run="x"'] > 900
    assert told["streamrl_cause", 'cause="paused",level="blocking",run="x"'] == 1
    assert re.search(r' unless on\(namespace, run\) streamrl_cause{cause=~?"paused(\|saving)?"} == 1$', alerts()[name])


def test_old_tokens_alarm_only_beyond_the_bound_of_a_run_that_still_runs(run: Watched) -> None:
    run.record(**{"lag/mean": 9.0})
    told = parse(prometheus_text(run.view(), "x", is_up=True))
    assert told["streamrl_lag_bound_steps", 'run="x"'] == run.world.config.lag.max_steps
    assert alerts()["StreamrlLag"] == (
        'streamrl_metric{name="lag/mean"} > on(namespace, run, instance) streamrl_lag_bound_steps + 1'
        " and on(namespace, run) streamrl_running == 1"
    )


def test_nobody_is_woken_for_a_redis_that_ended_with_its_run_but_for_a_run_that_crashed(tmp_path: Path) -> None:
    def told(state: str) -> dict[tuple[str, str], float]:
        folder = make_folder(tmp_path, state, state, **{"redis.url": "embedded"})
        with ConnectingWatcher(find_target(folder, None, None)) as watcher:
            return parse(prometheus_text(watcher.look(), "x", is_up=False))

    finished, crashed = told("finished"), told("running")
    assert finished["streamrl_up", 'run="x"'] == finished["streamrl_running", 'run="x"'] == 0
    assert alerts()["StreamrlRedisGone"] == "streamrl_up == 0 unless on(namespace, run) streamrl_running == 0"
    assert crashed["streamrl_cause", 'cause="crashed",level="blocking",run="x"'] == 1
    assert alerts()["StreamrlFailed"] == 'streamrl_cause{cause=~"failed|crashed"} == 1'


def test_every_panel_is_of_the_run_that_was_chosen() -> None:
    for panel in grafana_dashboard()["panels"]:
        for target in panel["targets"]:
            assert 'run="$run"' in target["expr"], target
            assert target["expr"].count("{") == target["expr"].count("}") == 1


def test_the_files_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "alerts"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == alert_rules()
    assert main(["export", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == grafana_dashboard()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=240) as reply:
        assert "text/plain; version=" in reply.headers["content-type"]
        return bytes(reply.read())


def test_a_scrape_over_http_tells_what_was_last_seen_and_asks_redis_nothing(run: Watched) -> None:
    run.worker()
    with opened(Target(url=run.world.url, run=run.world.keys.name)) as there:
        looker = Poller(Watcher(there.client, there.keys, server=there.server), period_s=1.0)
        looker.look()
        bound = bind("127.0.0.1", 0, what="test")
        with make_server(make_registry(there.keys.name, lambda: looker.seen), bound, silence_s=0.2) as server:
            thread = threading.Thread(target=server.serve_forever, name="exporter")
            thread.start()
            url = f"http://{address_of(bound)}/metrics"
            try:
                first = get(url)
                run.worker(name="another")
                assert get(url) == first
                looker.look()
                assert b"another" in get(url)
                with socket.create_connection(bound.getsockname(), timeout=10) as silent:
                    assert silent.recv(1) == b""  # closed: who says nothing holds no thread
            finally:
                server.shutdown()
                thread.join()


def test_it_waits_for_a_redis_that_is_not_there_yet_and_says_so(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    server.stop()
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "export", "prometheus", "--port", "0"]
    command += ["--redis", server.url, "--run", "early"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().rpartition(" ")[2].strip()
            assert b'streamrl_up{run="early"} 0.0' in get(url)
            told = process.stderr.readline()
            assert told.startswith("waiting for Redis at ")
            assert "streamrl_up is 0 until it answers" in told
            server = EmbeddedRedis.start(tmp_path / "redis")
            wait_until(lambda: b'streamrl_up{run="early"} 1.0' in get(url), description="it has found its Redis")
        finally:
            process.terminate()
            server.stop()


def test_a_run_that_had_ended_is_seen_in_its_redis_once_it_goes_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "late", "stopped", **{"redis.url": "embedded"})
    with ConnectingWatcher(find_target(folder, None, None)) as watcher:
        looker = Poller(watcher, period_s=1.0)

        def is_up() -> float:
            looker.look()
            return parse(generate_latest(make_registry("late", lambda: looker.seen)))["streamrl_up", 'run="late"']

        assert is_up() == 0
        assert looker.seen.view is not None
        assert looker.seen.view.run.state == "stopped"
        change_state(folder, state="running", pid=os.getpid(), process_began=started_at(os.getpid()))
        assert [is_up(), is_up()] == [0, 0], "its server does not answer yet"
        assert "is not running" in looker.seen.error
        with EmbeddedRedis.start(folder / "redis"):
            assert is_up() == 1


def test_a_password_that_is_wrong_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        url = server.url.replace("unix://", "unix://nobody:wrong@")
        assert main(["export", "prometheus", "--redis", url, "--run", "x", "--port", "0"]) == 2
    finally:
        server.stop()
    assert "Put the user into the URL" in capsys.readouterr().err
