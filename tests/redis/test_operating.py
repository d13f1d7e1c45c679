"""`streamrl pause|resume|drain|stop`: the word, who follows it, and what the journal says of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.ops.cli.main import main
from streamrl.ops.monitor.build import build_view
from streamrl.protocol.transport import operator_scripts as for_reports
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import await_obedience, set_control
from streamrl.protocol.transport.script import run
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.telemetry.progress import Progress, Report, Role, Wait
from tests.feed_world import make_config

Report_ = Callable[..., None]


@pytest.fixture
def report(client: redis.Redis, keys: Keys) -> Report_:
    """A part says which word it follows."""

    def write(part: str, *, age_s: float = 0.0, clock_is_off_by_s: float = 0.0, **detail: Any) -> None:
        role: Role = "learner" if part.startswith("learner") else "worker" if part.startswith("worker") else "launcher"
        progress = Progress(part=part, role=role)
        progress.note(**detail)
        with progress.waiting(Wait.GROUPS):
            made = progress.report()
        fields = {name: getattr(made, name) for name in made.__slots__}
        told = Report(**{**fields, "at": made.at - age_s + clock_is_off_by_s})
        run(client, for_reports.report(keys, part, encode_report(told)))
        client.zadd(keys.reported, {part: client.time()[0] - age_s})

    return write


def events(client: redis.Redis, keys: Keys) -> list[tuple[str, dict[str, Any]]]:
    return [(event.kind, dict(event.detail)) for event in snapshot(client, keys).events]


def order(*arguments: str, keys: Keys, url: str) -> int:
    return main([*arguments, "--redis", url, "--run", keys.name, "--timeout-s", "0"])


@pytest.mark.parametrize("off_by_s", [-3600.0, 3600.0])
def test_a_part_whose_clock_is_wrong_is_heard_all_the_same(
    learner: LearnerStream, client: redis.Redis, keys: Keys, report: Report_, off_by_s: float
) -> None:
    report("learner/0", control="stop", clock_is_off_by_s=off_by_s)
    report("worker/w", clock_is_off_by_s=off_by_s)

    assert await_obedience(client, keys, "stop", timeout_s=0.0).complete
    seen = build_view(snapshot(client, keys), run_name=keys.name, server="here")
    assert seen.learner.lead is not None
    assert [part.report_s < 10 for part in (seen.learner.lead, seen.workers[0].part)] == [True, True]
    assert [part.state for part in (seen.learner.lead, seen.workers[0].part)] == ["waiting", "waiting"]


def test_a_word_is_journaled_when_it_changes_something(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    assert not set_control(client, keys, "run", by="the test")
    assert set_control(client, keys, "pause", by="me@here")
    assert not set_control(client, keys, "pause", by="another")
    assert set_control(client, keys, "run", by="another")
    assert learner.orders().control == "run"
    told = [("control", {"mode": "pause", "by": "me@here"}), ("control", {"mode": "run", "by": "another"})]
    assert events(client, keys) == told


def test_a_pause_is_followed_when_the_learner_and_every_worker_that_lives_say_so(
    learner: LearnerStream, client: redis.Redis, keys: Keys, report: Report_
) -> None:
    report("learner/0", control="run")
    report("worker/a", control="pause")
    report("worker/b")
    report("worker/killed", age_s=60.0)
    report("learner/1")
    report("launcher")
    found = await_obedience(client, keys, "pause", timeout_s=0.0)
    assert (found.obeying, found.complete) == (("worker/a",), False)
    assert found.waiting_for == {"learner/0": "waits for groups", "worker/b": "waits for groups"}
    report("learner/0", control="pause")
    report("worker/b", control="pause")
    found = await_obedience(client, keys, "pause", timeout_s=0.0)
    assert (found.obeying, found.waiting_for) == (("learner/0", "worker/a", "worker/b"), {})


def test_a_drain_concerns_the_learner_alone_and_one_that_is_not_there_is_named(
    learner: LearnerStream, client: redis.Redis, keys: Keys, report: Report_
) -> None:
    report("worker/a", control="run")
    assert await_obedience(client, keys, "drain", timeout_s=0.0).waiting_for == {"learner/0": "is not there"}
    report("learner/0", control="drain")
    assert await_obedience(client, keys, "drain", timeout_s=0.0).complete


def test_those_concerned_are_listened_for(
    learner: LearnerStream, client: redis.Redis, keys: Keys, report: Report_
) -> None:
    heard: list[bool] = []
    listener = threading.Thread(
        target=lambda: heard.append(await_obedience(client, keys, "stop", timeout_s=10.0).complete)
    )
    listener.start()
    report("learner/0", control="stop")
    listener.join()
    assert heard == [True]


def test_the_end_of_the_run_answers_drain_and_stop(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    learner.release("stopped")
    found = await_obedience(client, keys, "stop", timeout_s=0.0)
    assert (found.state, found.complete) == ("stopped", True)


def test_a_word_that_ends_a_run_ends_with_it_and_a_pause_is_for_whoever_comes(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    set_control(client, keys, "pause", by="test")
    learner.release("failed")
    assert learner.orders().control == "pause"
    client.hset(keys.meta, "state", "running")
    set_control(client, keys, "drain", by="test")
    learner.release("stopped")
    assert learner.orders().control == "run"


def test_the_command_says_the_word_and_who_follows(
    learner: LearnerStream,
    client: redis.Redis,
    keys: Keys,
    redis_url: str,
    report: Report_,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report("learner/0", control="run")
    assert order("pause", keys=keys, url=redis_url) == 1
    assert capsys.readouterr().out == f"run {keys.name}: pause; not yet learner/0, which waits for groups\n"
    report("learner/0", control="pause")
    assert order("pause", "--json", keys=keys, url=redis_url) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mode"], told["changed"], told["acknowledged"]) == ("pause", False, True)
    assert (told["obeying"], told["waiting_for"], told["state"]) == (["learner/0"], {}, "running")
    for word, mode in (("resume", "run"), ("drain", "drain"), ("stop", "stop")):
        report("learner/0", control=mode)
        assert order(word, keys=keys, url=redis_url) == 0
        assert learner.orders().control == mode
    assert "learner/0 follows" in capsys.readouterr().out
    assert [kind for kind, _ in events(client, keys)] == ["control"] * 4


def test_a_run_that_has_ended_is_told_nothing(
    learner: LearnerStream, client: redis.Redis, keys: Keys, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    learner.release("finished")
    assert order("stop", keys=keys, url=redis_url) == 0
    assert order("pause", keys=keys, url=redis_url) == 2
    shown = capsys.readouterr()
    assert shown.out == f"run {keys.name}: finished\n"
    assert "has ended (finished)" in shown.err
    assert learner.orders().control == "run", "the learner that takes the run up would stop at once"


def test_a_run_is_found_by_its_folder_by_the_environment_or_by_name(
    learner: LearnerStream,
    keys: Keys,
    redis_url: str,
    report: Report_,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("STREAMRL_REDIS", raising=False)
    report("learner/0", control="pause")
    config = make_config().model_copy(update={"name": keys.name, "redis": schema.Redis(url=redis_url)})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert main(["pause", str(tmp_path)]) == 0
    assert main(["pause", "--run", keys.name]) == 2
    assert "STREAMRL_REDIS" in capsys.readouterr().err
    monkeypatch.setenv("STREAMRL_REDIS", redis_url)
    assert main(["pause", "--run", keys.name]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the folder of a run"),
        (["nowhere"], "nowhere is not the folder of a run"),
        (
            ["--redis", "http://host", "--run", "x"],
            "error: --redis (or STREAMRL_REDIS, or redis.url): 'http://host' is not a server address; must be redis://",
        ),
        (
            ["--redis", "redis://127.0.0.1:9", "--run", "x"],
            "Start Redis there, or set another server by --redis or redis.url",
        ),
    ],
)
def test_a_run_that_is_not_named_rightly_is_one_clear_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMRL_REDIS", raising=False)
    assert main(["pause", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_not_there_or_not_up_is_one_clear_error(
    client: redis.Redis, keys: Keys, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert order("pause", keys=keys, url=redis_url) == 2
    assert f"holds no run {keys.name!r}" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(dump_config(make_config()))
    assert main(["pause", str(tmp_path)]) == 2
    assert "run 'run' has not started; `streamrl up" in capsys.readouterr().err


def test_terminal_codes_in_names_do_not_reach_the_terminal(
    learner: LearnerStream, keys: Keys, redis_url: str, report: Report_, capsys: pytest.CaptureFixture[str]
) -> None:
    report("learner/0", control="pause")
    report("worker/\x1b[2J", control="pause")
    assert order("pause", keys=keys, url=redis_url) == 0
    assert "\x1b" not in capsys.readouterr().out
