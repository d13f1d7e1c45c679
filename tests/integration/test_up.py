"""`streamrl up`, with everything real: Redis, reward server, workers, torchrun. Each run is a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import transformers

from streamrl.demos.quickstart import write_base_model, write_data
from streamrl.protocol.transport.keys import Keys
from tests.helpers import processes_in, temporary_files, wait_until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
name: whole
dir: {dir}
model: {{path: {dir}/base, dtype: float32}}
data: {{train: {dir}/data/train.jsonl, validation: {dir}/data/validation.jsonl, max_prompt_tokens: 16}}
sampling: {{num_samples: 4, max_tokens: 8}}
rewards:
  exact: {{type: function, target: exact_match}}
  model: {{type: http, url: local}}
reward_server: {{model: {dir}/reward-model}}
optimizer: {{lr: 1e-4, min_lr: 1e-5}}
training: {{groups_per_step: 4, max_steps: 5}}
lag: {{max_steps: 2}}
weights: {{dtype: float32}}
checkpoint: {{every_steps: 2}}
validation: {{every_steps: 0, max_prompts: 4, sampling: {{max_tokens: 8}}}}
worker: {{threads: 1, grace_s: 2.0}}
learner: {{threads: 1}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, the same for all tests."""
    folder = tmp_path_factory.mktemp("made")
    write_base_model(folder / "base", seed=1)
    write_data(folder / "data", seed=1)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    judge.save_pretrained(folder / "reward-model")
    transformers.AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "reward-model")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Holds whole.yaml, and the run in whole/. Afterwards nothing of the run may be left."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "whole.yaml").write_text(CONFIG.format(dir=tmp_path))
    with tempfile.TemporaryDirectory(prefix="up-", dir="/tmp") as temporary:  # a short path, for sockets
        monkeypatch.setenv("TMPDIR", temporary)
        yield tmp_path
        assert temporary_files(temporary) == []
    wait_until(lambda: not processes_in(tmp_path), description="no process of the run")
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []
    record = tmp_path / "whole" / "run.json"
    if record.exists():
        uid = json.loads(record.read_text())["run_uid"]
        assert list(Path("/dev/shm").glob(f"streamrl-mirror-{uid}-*")) == []


@pytest.fixture
def emptied(client: redis.Redis) -> Iterator[redis.Redis]:
    """The server, empty again afterwards."""
    yield client
    client.flushall()


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    words = ["-m", "streamrl.ops.cli.main", "up", str(folder / "whole.yaml"), "--json", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[str], *, code: int = 0) -> dict[str, Any]:
    """Its summary; it must end with this code."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    return dict(json.loads(out.splitlines()[-1]))


def num_steps(folder: Path) -> int:
    metrics = folder / "whole" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum("train_optim/optim_step" in line for line in lines)


def worker_pid(folder: Path) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").split()  # the launcher's forks have blanks in it
        except OSError:  # it has just ended
            continue
        if b"worker" in words and str(folder).encode() in b" ".join(words):
            return int(path.parent.name)
    return None


def test_a_run_on_vllm_with_two_ranks_trains_loses_nothing_and_leaves_nothing(folder: Path) -> None:
    summary = finish(start(folder, "learner.processes=2"))

    assert summary["state"] == "finished"
    assert summary["steps"] == 5
    assert summary["trained"] == 20
    assert (summary["lost"], summary["twice"], summary["dead"], summary["clean"]) == (0, 0, 0, True)
    assert summary["issued"] == summary["trained"] + sum(summary["dropped"].values()) + summary["outstanding"]
    assert 3 <= summary["versions_published"] <= 6  # one that is still on its way when a step ends is passed over
    assert summary["loads"]["loaded"] >= 3
    assert set(summary["held_out"]) == {"exact", "model"}
    assert summary["restarts"] == {}
    transformers.AutoModelForCausalLM.from_pretrained(summary["export"])


@pytest.mark.long
def test_ranks_that_share_layers_train_to_the_end_and_one_rank_goes_on_with_what_they_left(folder: Path) -> None:
    shared = finish(start(folder, "worker.engine=transformers", "learner.processes=2", "learner.layout.tensor=2"))
    alone = finish(start(folder, "worker.engine=transformers", "training.max_steps=8"))

    for summary, steps in ((shared, 5), (alone, 8)):
        assert summary["state"] == "finished"
        assert summary["steps"] == steps
        assert (summary["lost"], summary["twice"], summary["dead"], summary["clean"]) == (0, 0, 0, True)
        assert summary["restarts"] == {}
        transformers.AutoModelForCausalLM.from_pretrained(summary["export"])
    records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    fresh = [record["policy/fresh_mismatch"] for record in records if "policy/fresh_mismatch" in record]
    assert max(fresh) < 1e-3, "what they serve is what they train"


@pytest.mark.long
def test_workers_that_are_killed_or_sent_away_come_again_ctrl_c_drains_and_another_start_goes_on(folder: Path) -> None:
    fast = ("worker.engine=transformers", "training.max_steps=400")
    process = start(folder, *fast)
    wait_until(lambda: num_steps(folder) >= 2, description="two steps", timeout_s=240)
    pid = worker_pid(folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_at = num_steps(folder)
    wait_until(lambda: num_steps(folder) >= killed_at + 8, description="steps with another worker", timeout_s=240)
    pid = worker_pid(folder)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)  # as `why` advises where one is stuck; it leaves in good order
    wait_until(lambda: worker_pid(folder) not in (None, pid), description="a third worker", timeout_s=240)
    asked_at = num_steps(folder)
    wait_until(lambda: num_steps(folder) >= asked_at + 8, description="steps with the third worker", timeout_s=240)
    process.send_signal(signal.SIGINT)
    summary = finish(process, code=128 + signal.SIGINT)

    assert summary["state"] == "stopped"
    assert summary["restarts"] == {"worker/0": 2}
    assert (summary["lost"], summary["twice"], summary["clean"]) == (0, 0, True)

    again = finish(start(folder, fast[0], f"training.max_steps={summary['steps'] + 3}"))

    assert again["state"] == "finished"
    assert again["steps"] == summary["steps"] + 3
    assert (again["lost"], again["twice"], again["clean"]) == (0, 0, True)

    refused = start(folder, fast[0], "seed=99", "training.max_steps=1000")
    _, err = refused.communicate(timeout=240)
    assert refused.returncode == 2
    assert "seed: 1234 -> 99" in err
    assert "must keep these" in err


@pytest.mark.long
def test_another_run_starts_from_a_checkpoint_with_settings_that_a_resumed_one_may_not_change(folder: Path) -> None:
    engine = "worker.engine=transformers"
    finish(start(folder, engine))
    fork = (engine, "name=fork", "sampling.temperature=0.7", "--fork", str(folder / "whole"))

    refused = start(folder, *fork)
    _, err = refused.communicate(timeout=240)
    assert refused.returncode == 2
    assert "training.max_steps = 5" in err
    assert "set it to 10 for as many further steps" in err
    assert not (folder / "fork").exists()
    forked = finish(start(folder, *fork, "training.max_steps=7"))

    assert (forked["state"], forked["steps"]) == ("finished", 7)
    assert (forked["lost"], forked["twice"], forked["clean"]) == (0, 0, True)

    other = (engine, "name=other", "seed=99", "training.max_steps=7", "--fork", str(folder / "whole"))
    refused = start(folder, *other)
    _, err = refused.communicate(timeout=240)
    assert refused.returncode == 2
    assert "made with other prompts, seed or order" in err
    assert "--new-data" in err
    shutil.rmtree(folder / "other")
    assert finish(start(folder, *other, "--new-data"))["steps"] == 7

    again = start(folder, *fork, "training.max_steps=9")
    _, err = again.communicate(timeout=240)
    assert again.returncode == 2
    assert "fork exists already: give the fork its own name, with name=NEW, or leave out --fork to continue it" in err


@pytest.mark.long
def test_asked_twice_to_end_it_ends_at_once(folder: Path) -> None:
    process = start(folder, "worker.engine=transformers", "training.max_steps=400")
    wait_until(lambda: num_steps(folder) >= 1, description="a step", timeout_s=240)

    process.send_signal(signal.SIGINT)
    log = folder / "whole" / "logs" / "launcher.log"
    wait_until(lambda: "stop_requested" in log.read_text(), description="the first request is heeded")
    process.send_signal(signal.SIGINT)

    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"ended at once, without a checkpoint: the run is back at step \d+; .* will be repeated", err)


def test_a_part_that_cannot_work_ends_the_run_with_its_own_words_and_an_operators_word_stands(
    folder: Path, redis_url: str, emptied: redis.Redis
) -> None:
    keys = Keys("whole")
    emptied.hset(keys.control, "mode", "pause")  # to a learner elsewhere, perhaps
    process = start(folder, f"reward_server.model={folder / 'base'}", f"redis.url={redis_url}")

    _, err = process.communicate(timeout=240)

    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("error: reward/0: the model ")
    assert "has no reward head" in err.splitlines()[-1]
    assert emptied.hget(keys.control, "mode") == b"pause"
