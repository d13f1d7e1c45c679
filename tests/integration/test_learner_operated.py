"""The learner as a process while an operator speaks to it, and while Redis is short of room."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from tests.faults.agents import named_ranks
from tests.helpers import wait_until
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner

PATIENCE_S = 240


@pytest.fixture
def url(redis_server: EmbeddedRedis, client: redis.Redis) -> Iterator[str]:
    yield redis_server.url
    client.flushall()


def order(word: str, config: schema.Config, url: str) -> int:
    return main([word, "--redis", url, "--run", config.name, "--timeout-s", "60"])


def steps(config: schema.Config) -> list[int]:
    return [line["step"] for line in lines(config.folder / "metrics.jsonl") if "train_optim/loss" in line]


def test_a_run_holds_goes_on_and_stops_as_it_is_told_and_makes_room_by_early_checkpoints(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(
        tmp_path,
        name="operated",
        redis=schema.Redis(max_backlog_bytes=16_000),
        training=schema.Training(groups_per_step=4, max_steps=10_000, max_epochs=100),
        checkpoint=schema.Checkpoint(every_steps=10_000),
        lag=schema.Lag(max_steps=2, stale="wait"),
    )
    keys = Keys(config.name)
    with made_up_worker(config, url), running_learner(config, url) as process:
        wait_until(lambda: steps(config)[-1:] >= [8], description="steps are made", timeout_s=PATIENCE_S)
        assert order("pause", config, url) == 0
        [report] = snapshot(client, keys).reports
        assert report.detail["control"] == "pause"
        held = len(steps(config))
        wait_until(
            lambda: [r.doing for r in snapshot(client, keys).reports] == ["resume"],
            description="the learner says that it waits",
        )
        assert len(steps(config)) == held
        assert order("resume", config, url) == 0
        wait_until(lambda: len(steps(config)) > held, description="it goes on", timeout_s=PATIENCE_S)
        assert order("stop", config, url) == 0
        assert process.wait(PATIENCE_S) == 0, output(config)
    seen = snapshot(client, keys, num_events=1000)
    assert seen.run is not None
    assert (seen.run.state, seen.control) == ("stopped", "run")
    kinds = [event.kind for event in seen.events]
    assert kinds.count("control") == 3
    assert kinds.count("obeys") == 3
    assert kinds.count("checkpoint") >= 3, "the last one, and those that made room"
    records = lines(config.folder / "metrics.jsonl")
    assert max(record["stream/backlog_bytes"] for record in records) <= 1.05 * 16_000, "partly an estimate"
    assert max(record["lag/max"] for record in records) <= 2


def test_a_store_that_refuses_weights_lets_training_run_no_further_ahead_of_the_workers_than_it_may(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    store = tmp_path / "store"
    config = make_run(
        tmp_path,
        name="unpublished",
        training=schema.Training(groups_per_step=4, max_steps=10_000, max_epochs=100),
        checkpoint=schema.Checkpoint(every_steps=10_000),
        weights=schema.Weights(dtype="float32", store=f"file:{store}"),
        lag=schema.Lag(max_steps=1),
    )
    keys = Keys(config.name)

    def waits_for_weights() -> bool:
        return [report.doing for report in snapshot(client, keys).reports] == ["weights"]

    with made_up_worker(config, url), running_learner(config, url) as process:
        wait_until(lambda: steps(config)[-1:] >= [3], description="steps are made", timeout_s=PATIENCE_S)
        store.rename(tmp_path / "aside")
        store.write_text("in the way")
        wait_until(waits_for_weights, description="the learner says that it waits", timeout_s=PATIENCE_S)
        wait_until(lambda: num_commits(client, keys) == 1, description="what is trained is committed")
        held = steps(config)[-1]
        assert held - int(client.hget(keys.weights, "step") or 0) == 2, "steps with a lag of 0 and 1, and none beyond"
        wait_until(lambda: output(config).count("weights not stored") >= 5, description="it tries again and again")
        assert steps(config)[-1] == held
        store.unlink()
        (tmp_path / "aside").rename(store)
        wait_until(lambda: steps(config)[-1] > held + 3, description="it goes on", timeout_s=PATIENCE_S)
        assert order("stop", config, url) == 0
        assert process.wait(PATIENCE_S) == 0, output(config)


def num_commits(client: redis.Redis, keys: Keys) -> int:
    return [event.kind for event in snapshot(client, keys, num_events=1000).events].count("checkpoint")


def test_a_learner_that_validates_hears_the_operator_too(url: str, tmp_path: Path, client: redis.Redis) -> None:
    prompts = str(tmp_path / "prompts.jsonl")
    config = make_run(
        tmp_path,
        name="unanswered",
        data=schema.Data(train=prompts, validation=prompts),
        validation=schema.Validation(every_steps=0, at_start=True, max_prompts=5),
    )
    keys = Keys(config.name)
    with running_learner(config, url) as process:
        wait_until(
            lambda: [r.doing for r in snapshot(client, keys).reports] == ["evaluation"],
            description="the learner validates, and no worker answers",
            timeout_s=PATIENCE_S,
        )
        assert order("stop", config, url) == 0
        assert process.wait(PATIENCE_S) == 0, output(config)
    assert client.hget(keys.meta, "state") == b"stopped"
    newest = max((config.folder / "checkpoints").glob("e*"))
    state = json.loads((newest / "manifest.json").read_text())["content"]["state"]
    assert state["stream"]["ledger"]["issued"] == 0


def test_a_signal_to_one_rank_ends_all_in_a_pause_too(url: str, tmp_path: Path, client: redis.Redis) -> None:
    """As when one of several hosts is told to go: its agent signals only the ranks there."""
    config = make_run(tmp_path, name="leaving")

    def has_committed() -> bool:
        return num_commits(client, Keys(config.name)) == 1

    with running_learner(config, url, processes=2) as agent:
        wait_until(
            lambda: "groups" in [r.doing for r in snapshot(client, Keys(config.name)).reports],
            description="the learner waits for groups, and there is no worker",
            timeout_s=PATIENCE_S,
        )
        assert order("pause", config, url) == 0
        before = named_ranks(agent.pid)
        os.kill(before[1], signal.SIGTERM)
        wait_until(has_committed, description="the ranks save and end", timeout_s=PATIENCE_S)
        wait_until(
            lambda: not set(before.values()) & set(named_ranks(agent.pid).values()),
            description="both have ended",
            timeout_s=PATIENCE_S,
        )
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE_S) == 0, output(config)
    for rank in (0, 1):
        assert f"part=learner/{rank} state=stopped" in output(config), "torchrun may report them as failed (76)"


def test_a_learner_shows_itself_before_it_has_read_and_loaded_anything(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    never_read = tmp_path / "never-read.jsonl"
    os.mkfifo(never_read)  # who reads it waits for somebody who writes it
    config = make_run(tmp_path, name="loading", data=schema.Data(train=str(never_read)))
    with running_learner(config, url):
        [report] = wait_until(
            lambda: snapshot(client, Keys(config.name)).reports, description="it reports", timeout_s=PATIENCE_S
        )
        assert (report.part, report.state) == ("learner/0", "starting")
        assert snapshot(client, Keys(config.name)).run is None


def test_of_two_learners_too_many_one_ends_by_itself_and_a_stop_ends_the_standby_too(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(
        tmp_path,
        name="wanted",
        training=schema.Training(groups_per_step=4, max_steps=10_000, max_epochs=100),
        learner=schema.Learner(threads=1, lease_s=2.0),
    )
    keys = Keys(config.name)

    def shown() -> list[tuple[str, str]]:
        reports = snapshot(client, keys).reports
        return [(r.part.partition("/")[0], r.doing) for r in reports if not r.part.startswith("learner/0")]

    few = 10 * config.training.groups_per_step  # else it trains on all cores while the others begin
    with made_up_worker(config, url, may_answer=lambda: few), ExitStack() as stack:
        first = stack.enter_context(running_learner(config, url))
        wait_until(lambda: steps(config), description="steps are made", timeout_s=PATIENCE_S)
        refused = stack.enter_context(running_learner(config, url, processes=1))
        standby = stack.enter_context(running_learner(config, url, "--standby", processes=1))
        leaver = stack.enter_context(running_learner(config, url, "--standby", processes=2))
        assert refused.wait(PATIENCE_S) == 2, output(config)
        assert output(config).count("learner: run 'wanted' already has a learner") == 1, "it was not tried again"
        assert not (config.folder / "error.json").exists(), "the run is well"
        both = [("standby", "lease")] * 3
        wait_until(lambda: shown() == both, description="the ranks that stand by are shown", timeout_s=PATIENCE_S)
        wait_until(lambda: len(named_ranks(leaver.pid)) == 2, description="its ranks are there", timeout_s=PATIENCE_S)
        first_ranks = set(named_ranks(leaver.pid).values())
        os.kill(named_ranks(leaver.pid)[1], signal.SIGTERM)  # as another host does with its own rank
        wait_until(
            lambda: len(set(named_ranks(leaver.pid).values()) - first_ranks) == 2,
            description="both ranks have ended and are started again",
            timeout_s=PATIENCE_S,
        )
        wait_until(lambda: shown() == both, description="they stand by again", timeout_s=PATIENCE_S)
        leaver.send_signal(signal.SIGTERM)
        assert leaver.wait(PATIENCE_S) == 0, output(config)
        assert order("stop", config, url) == 0
        assert [one.wait(PATIENCE_S) for one in (first, standby)] == [0, 0], output(config)
    assert client.hget(keys.meta, "state") == b"stopped"
    assert [path.name for path in (config.folder / "terms").iterdir()] == ["000001"]


@pytest.mark.long
def test_a_learner_that_is_replaced_ends_by_itself_and_a_standby_waits_again(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(
        tmp_path,
        name="taken",
        training=schema.Training(groups_per_step=4, max_steps=10_000, max_epochs=100),
        learner=schema.Learner(threads=1, lease_s=2.0),
    )
    keys = Keys(config.name)

    def at_work(term: int) -> bool:
        return [line["term"] for line in lines(config.folder / "metrics.jsonl")][-1:] == [term]

    with made_up_worker(config, url), ExitStack() as stack:
        agents = []
        for term, words in enumerate([["--standby"], ["--takeover"], ["--takeover"]], 1):
            agents.append(stack.enter_context(running_learner(config, url, *words, processes=1)))
            wait_until(lambda: at_work(term), description=f"term {term} is at work", timeout_s=PATIENCE_S)  # noqa: B023
        assert agents[1].wait(PATIENCE_S) == 2, output(config)
        agents[2].send_signal(signal.SIGTERM)
        assert agents[2].wait(PATIENCE_S) == 0, output(config)
        wait_until(lambda: at_work(4), description="the standby goes on", timeout_s=PATIENCE_S)
        assert order("stop", config, url) == 0
        assert agents[0].wait(PATIENCE_S) == 0, output(config)
    assert client.hget(keys.meta, "state") == b"stopped"
