"""Secrets that a run is given stay where they were: the parts start with marked ones, and whatever they say, write,
store or are called by is searched for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.tiny_models import make_model
from tests.worker_processes import descendants

ROOT = Path(__file__).resolve().parents[2]
MARK = "marked-secret"  # in each, so that a part of one is found, too
PASSWORD, WRONG, REWARD, DASHBOARD = (f"{MARK}-{name}" for name in ("redis", "wrong", "reward", "dashboard"))
_LOOK_EVERY_S, _LIMIT_S = 0.1, 200.0
OF_THE_ENVIRONMENT = (
    *("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"),
    *("STREAMRL_SENTINEL_PASSWORD", "JUDGE_API_KEY", "NVIDIA_API_KEY"),
)
CONFIG = """
name: secretive
dir: {dir}/runs
redis: {{url: "{url}"}}
model: {{path: {dir}/model, dtype: float32}}
data: {{train: {dir}/train.jsonl, max_prompt_tokens: 16}}
sampling: {{num_samples: 4, max_tokens: 4}}
rewards:
  tells: {{type: function, target: "{dir}/rewards.py:tells"}}
  fails: {{type: function, target: "{dir}/rewards.py:fails"}}
  judge: {{type: http, url: "http://127.0.0.1:{port}", token_file: {dir}/reward-token}}
training: {{groups_per_step: 2, max_steps: 1}}
algorithm: {{mask_unfinished: false}}
weights: {{dtype: float32, prove: false}}
validation: {{every_steps: 0, at_start: false, at_end: false}}
worker: {{engine: transformers, threads: 1, grace_s: 1.0}}
learner: {{threads: 1}}
"""
REWARDS = """
import os

def tells(prompt, completion, token_ids, fields):
    print(dict(os.environ))
    return float(len(token_ids) % 3)

def fails(prompt, completion, token_ids, fields):
    if sum(token_ids) % 5 == 0: raise ValueError(str(dict(os.environ)))
    return float(sum(token_ids) % 2)
"""


@pytest.fixture
def environment() -> dict[str, str]:
    secrets = {name: f"{MARK}-{name}" for name in OF_THE_ENVIRONMENT}
    ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STREAMRL_REDIS_PASSWORD": PASSWORD}
    return {**os.environ, **ours, **secrets}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One that wants the password."""
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
            client.config_set("requirepass", PASSWORD)
        yield server
    finally:
        server.stop()


@pytest.fixture
def folder(tmp_path: Path, server: EmbeddedRedis, judge: str) -> Path:
    make_model(tmp_path / "model", hidden=32, positions=2048)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (tmp_path / "dashboard-token").write_text(DASHBOARD)
    text = CONFIG.format(dir=tmp_path, url=server.url.replace("unix://", "unix://default@"), port=judge)
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[str]:
    """The port of a reward server that wants a token."""
    token = tmp_path / "reward-token"
    token.write_text(REWARD)
    command = [sys.executable, "-m", "tests.fake_reward_server", "0", str(token)]
    with (tmp_path / "judge.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()
            process.communicate()


class Watch:
    """What was said, and what the processes were called."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.said: dict[str, str] = {}

    def streamrl(self, *words: str, until: str | None = None, codes: tuple[int, ...] = (0,), **more: str) -> None:
        """Runs to its end, or until it has said something."""
        command = [sys.executable, "-m", "streamrl.ops.cli.main", *words]
        name, end = " ".join(words[:2]), time.monotonic() + _LIMIT_S
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**self.environment, **more}, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            said = b""
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
                self._look_at_commands(descendants(process.pid))  # its own words are what the test typed
                said += process.stdout.read() or b""
                if until is not None and until.encode() in said:
                    process.terminate()
                    process.wait(60)
            process.kill()
            said += process.stdout.read() or b""
            self.said[f"{name} {len(self.said)}"] = said.decode(errors="replace")
            assert until is not None or process.returncode in codes, said.decode(errors="replace")

    def _look_at_commands(self, pids: set[int]) -> None:
        for pid in pids:
            try:
                self.said[f"/proc/{pid}/cmdline"] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            except OSError:  # it has just ended
                continue


def test_commands_that_are_given_a_password_show_it_nowhere(
    folder: Path, server: EmbeddedRedis, environment: dict[str, str]
) -> None:
    watch, config = Watch(environment), str(folder / "run.yaml")
    watch.streamrl("config", "show", config)
    watch.streamrl("learn", config, "--dry-run", "--redis", _with_password(server.url))
    watch.streamrl("learn", config, codes=(1, 2), STREAMRL_REDIS_PASSWORD=WRONG)
    watch.streamrl("learn", config, f"redis.url={_with_password(server.url)}", codes=(2,))
    assert [name for name, text in watch.said.items() if MARK in text] == []
    assert _files_with_a_secret(folder) == ["dashboard-token", "reward-token"]


@pytest.mark.long
def test_no_secret_of_a_run_is_said_written_stored_or_in_a_list_of_processes(
    folder: Path, environment: dict[str, str]
) -> None:
    watch, config, run = Watch(environment), str(folder / "run.yaml"), str(folder / "runs" / "secretive")
    watch.streamrl("doctor", config, "--for", "worker", codes=(0, 1, 2, 3))
    watch.streamrl("up", config, "--json")
    for command in ("status", "why", "audit"):
        watch.streamrl(command, run, "--json", codes=(0, 1, 2, 3, 4, 5))
    watch.streamrl("groups", "tail", run, "--json", codes=(0, 1, 2))
    watch.streamrl("dashboard", run, "--port", "0", "--token-file", str(folder / "dashboard-token"), until="http://")
    watch.streamrl("export", "prometheus", run, "--port", "0", until="http://")
    watch.streamrl("status", run, codes=(0, 5, 6), STREAMRL_REDIS_PASSWORD=WRONG)
    assert [name for name, text in watch.said.items() if MARK in text] == []
    assert _files_with_a_secret(folder) == ["dashboard-token", "reward-token"]


def _with_password(url: str) -> str:
    return url.replace("unix://", f"unix://default:{PASSWORD}@")


def _files_with_a_secret(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in files if MARK.encode() in path.read_bytes())
