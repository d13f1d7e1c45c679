"""Metrics as Redis keeps them, whole and bounded; and the commands that read them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import redis

from streamrl.ops.cli.main import main
from streamrl.ops.monitor.history import HELD_OUT, History
from streamrl.ops.monitor.poller import Watcher, look_once
from streamrl.ops.monitor.runs import Opened, list_runs
from streamrl.protocol.transport.keys import LONGEST_RECENT, LONGEST_THINNED, NUM_LEVELS, Keys, history_streams
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.weights.file_store import FileStore
from streamrl.terminal import size
from tests.redis.conftest import UID, MakeLearner

REWARD = "train_rollouts/rewards"


def record(learner: LearnerStream, *steps: int, reward: float = 0.5) -> None:
    for step in steps:
        learner.record(step, {REWARD: reward, "train_optim/optim_step": float(step)})


def read(client: redis.Redis, keys: Keys) -> History:
    history = History()
    history.refresh(client, keys)
    return history


def long_run(client: redis.Redis, keys: Keys, *, num_steps: int) -> None:
    """As the learner's script writes it, by hand for speed."""
    with client.pipeline(transaction=False) as pipe:
        for step in range(1, num_steps + 1):
            fields = {"step": step, "term": 1, "at": step, "values": json.dumps({REWARD: step / num_steps})}
            for stream, longest in history_streams(keys, step, is_validation=False).items():
                pipe.xadd(stream, dict(fields), maxlen=longest, approximate=True)
        pipe.execute()


def test_a_curve_has_its_whole_length_in_few_points(client: redis.Redis, keys: Keys) -> None:
    long_run(client, keys, num_steps=20_000)
    steps, values = read(client, keys).curve(REWARD)
    assert steps == sorted(set(steps))
    assert (steps[0] <= 64, steps[-1]) == (True, 20_000)
    assert values[-1] == 1.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert set(gaps[-LONGEST_RECENT + 1 :]) == {1}
    assert max(gaps) <= 64
    assert len(steps) < LONGEST_RECENT + 500 + NUM_LEVELS * (LONGEST_THINNED + 500)


def test_what_redis_keeps_is_bounded(client: redis.Redis, keys: Keys) -> None:
    long_run(client, keys, num_steps=12_000)
    assert client.xlen(keys.metrics) < LONGEST_RECENT + 200
    assert client.xlen(keys.thinned(1)) < LONGEST_THINNED + 200


def test_the_learner_writes_what_the_history_reads(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    record(learner, *range(1, 18))
    learner.record(16, {"val_rollouts/rewards": 0.7})
    assert [client.xlen(keys.thinned(level)) for level in (1, 2, 3)] == [4, 1, 0]
    history = read(client, keys)
    assert [r.step for r in history.steps.records] == list(range(1, 18))
    assert history.curve("val_rollouts/rewards") == ([16], [0.7])


def test_only_what_is_new_is_read_again(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    record(learner, 1, 2)
    history = read(client, keys)
    assert not history.refresh(client, keys)
    record(learner, 3)
    assert history.refresh(client, keys)
    assert [r.step for r in history.steps.records] == [1, 2, 3]


def test_steps_made_again_after_a_crash_replace_those_of_the_dead(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    first = make_learner(term=1)
    record(first, *range(1, 9), reward=0.1)
    live = read(client, keys)
    second = make_learner(term=2)
    record(second, 5, 6, reward=0.9)
    live.refresh(client, keys)
    for history in (live, read(client, keys)):
        steps, values = history.curve(REWARD)
        assert steps == [1, 2, 3, 4, 5, 6]
        assert values == [0.1] * 4 + [0.9] * 2


def test_a_redis_that_was_emptied_begins_the_history_anew(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    record(make_learner(term=1), 1, 2, 3)
    history = read(client, keys)
    client.flushall()
    record(make_learner(term=2), 1)
    client.xtrim(keys.metrics, maxlen=0)
    history.refresh(client, keys)
    assert history.steps.records == []


def test_a_long_watch_does_not_grow_for_ever(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    history = History(longest=20)
    for step in range(1, 60):
        record(learner, step)
        history.refresh(client, keys)
    assert len(history.steps.records) <= 21
    assert (history.steps.records[0].step, history.steps.records[-1].step) == (1, 59)


def test_one_look_has_all_validations_and_those_of_steps_that_count(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    first = make_learner(term=1)
    ranks_nothing = {"val_rollouts/ranks": 0.0, "val_rollouts/num_unanswered": 9.0}
    for step, reward in ((0, 0.2), (20, 0.4)):
        record(first, *range(step + 1, step + 21))
        first.record(step, {HELD_OUT: reward, f"{HELD_OUT}/exact": reward})
    second = make_learner(term=2)
    record(second, *range(31, 130))
    second.record(21, {HELD_OUT: 0.5, f"{HELD_OUT}/exact": 0.5, **ranks_nothing})
    watcher = Watcher(client, keys, server="here")
    once, often = look_once(Opened(client=client, keys=keys, server="here")), watcher.look()
    assert once.learner.held_out == often.learner.held_out == {"exact": (0.2, 0.4, 0.5)}
    assert once.causes == often.causes
    assert "validation_ranks_nothing" in {cause.name for cause in once.causes}


@pytest.fixture
def recorded(learner: LearnerStream) -> LearnerStream:
    record(learner, *range(1, 80))
    learner.record(40, {"val_rollouts/rewards": 0.7})
    return learner


def test_the_plot_is_a_png_from_redis(
    recorded: LearnerStream, redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.png"
    assert main(["plot", "--redis", redis_url, "--run", keys.name, "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "79 steps, 1 validations" in capsys.readouterr().out


def test_the_plot_is_a_png_from_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"step": step, "term": 1, "at": 0.0, REWARD: 0.1 * step} for step in (1, 2, 3, 2)]
    lines[-1]["term"] = 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "report.png"
    assert main(["plot", str(tmp_path), "-o", str(output)]) == 0
    assert "2 steps, 0 validations" in capsys.readouterr().out
    assert output.stat().st_size > 10_000
    assert main(["plot", str(tmp_path / "nothing")]) == 2


def test_a_run_without_steps_has_no_plot(learner: LearnerStream, redis_url: str, keys: Keys) -> None:
    assert main(["plot", "--redis", redis_url, "--run", keys.name]) == 2


def test_all_runs_of_a_server_are_listed(
    make_learner: MakeLearner,
    redis_url: str,
    run_name: str,
    client: redis.Redis,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # whose folder `runs` is listed, too: that of a checkout may have a quickstart's
    names = [run_name, f"{run_name}-2", f"{run_name}-{{odd}}"]
    learners = [make_learner(of=Keys(name)) for name in names]
    learners[1].release("finished")
    client.set(f"streamrl:{{{run_name}}}:blob:x", b"no run")
    assert {run.name for run in list_runs(client).runs} == set(names)
    assert main(["runs", "ls", "--redis", redis_url]) == 0
    out = capsys.readouterr().out
    assert "3 runs" in out
    assert main(["runs", "ls", "--redis", redis_url, "--json"]) == 0
    found = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert (found[run_name]["is_live"], found[f"{run_name}-2"]["state"]) == (True, "finished")


def test_a_live_run_is_not_removed_by_mistake(
    learner: LearnerStream, redis_url: str, keys: Keys, client: redis.Redis
) -> None:
    assert main(["runs", "rm", "--redis", redis_url, "--run", keys.name]) == 2
    learner.release("stopped")
    assert main(["runs", "rm", "--redis", redis_url, "--run", keys.name]) == 0
    assert list_runs(client).runs == ()


def ended_run(make_learner: MakeLearner, store: str) -> None:
    """A run of term 1 whose weights are in this store."""
    learner = make_learner(claim=False)
    learner.claim(config_json=json.dumps({"weights": {"store": store}}), fingerprint="model", wait_s=0.0)
    learner.release("finished")


def test_removing_a_run_removes_its_weights_from_a_shared_folder_and_no_others(
    make_learner: MakeLearner, redis_url: str, keys: Keys, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = FileStore(tmp_path)
    of_a_newer_term = f"{UID}/000002/7-0-cc"  # the run goes on with another Redis
    for name in (f"{UID}/000001/0-0-aa", f"{UID}/000001/1-0-bb", of_a_newer_term, "other/000001/0-0-aa"):
        store.put(name, b"x" * 1000)
    ended_run(make_learner, f"file:{tmp_path}")
    assert main(["runs", "rm", "--redis", redis_url, "--run", keys.name]) == 0
    assert sorted(store.list()) == sorted([of_a_newer_term, "other/000001/0-0-aa"])
    assert f"removed, and {size(2000)} of weights in file:{tmp_path}/{UID}/" in capsys.readouterr().out


def test_a_run_whose_weights_cannot_be_removed_stays_unless_they_may_stay(
    make_learner: MakeLearner, redis_url: str, keys: Keys, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(make_learner, "nosuch://bucket")
    target = ["runs", "rm", "--redis", redis_url, "--run", keys.name]
    assert main(target) == 2
    told = capsys.readouterr().err
    assert f"its weights in nosuch://bucket/{UID}/ cannot be deleted" in told
    assert "--keep-weights" in told
    assert [run.name for run in list_runs(client).runs] == [keys.name]
    assert main([*target, "--keep-weights"]) == 0
    assert f"its weights stay in nosuch://bucket/{UID}/" in capsys.readouterr().out
    assert list_runs(client).runs == ()


def test_weights_that_are_not_seen_from_here_are_named_when_their_run_is_removed(
    make_learner: MakeLearner, redis_url: str, keys: Keys, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended_run(make_learner, f"file:{tmp_path / 'not mounted'}")
    assert main(["runs", "rm", "--redis", redis_url, "--run", keys.name]) == 0
    assert f"this machine sees no weights of it in file:{tmp_path / 'not mounted'}/{UID}/" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["*", "{}*", "{}?", "[a-zA-Z]*", ""])
def test_a_pattern_removes_nothing(
    learner: LearnerStream,
    keys: Keys,
    redis_url: str,
    client: redis.Redis,
    capsys: pytest.CaptureFixture[str],
    pattern: str,
) -> None:
    before = sorted(client.scan_iter())
    name = pattern.format(keys.name)
    assert main(["runs", "rm", "--redis", redis_url, "--run", name]) == 2
    assert "names one run, no pattern" in capsys.readouterr().err
    assert sorted(client.scan_iter()) == before
