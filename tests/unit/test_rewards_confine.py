"""What a reward function's process is kept from: sockets, the worker's variables, other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.workers import preflight
from streamrl.workers.confined import function_child
from streamrl.workers.rewards.functions import build_function_reward
from tests.tiny_rewards import make_item

CODE = """
import asyncio, os, socket, subprocess, sys, urllib.request

def connect(prompt, completion, token_ids, fields):
    with socket.create_connection(("127.0.0.1", int(completion)), timeout=5): return 1.0

def by_path(prompt, completion, token_ids, fields):
    with socket.socket(socket.AF_UNIX) as one: one.connect(completion)
    return 1.0

def by_name(prompt, completion, token_ids, fields):
    urllib.request.urlopen("http://reward.example/")
    return 1.0

def by_a_program(prompt, completion, token_ids, fields):
    code = f"import socket; socket.create_connection(('127.0.0.1', {completion}), timeout=5)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return 1.0

def look_at_parent(prompt, completion, token_ids, fields):
    with open(f"/proc/{os.getppid()}/environ") as file: return float(len(file.read()))

def read_parent_memory(prompt, completion, token_ids, fields):
    with open(f"/proc/{os.getppid()}/mem", "rb") as file: return 1.0

def signal_parent(prompt, completion, token_ids, fields):
    os.kill(os.getppid(), 0)
    return 1.0

def variable(prompt, completion, token_ids, fields): return float(completion in os.environ)

async def patient(prompt, completion, token_ids, fields):
    await asyncio.sleep(0.001)
    with open(__file__) as file: return float(bool(file.read()))
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(CODE)
    return f"{tmp_path}/rewards.py"


async def score(target: str, function: str, completion: str, **settings: Any) -> float | None:
    target = f"{target}:{function}"
    source = schema.FunctionReward(type="function", target=target, **settings)
    everything = Permissions(
        reward_code=(target,), reward_network=(target,), reward_environment=tuple(source.environment)
    )
    reward = build_function_reward("mine", source, everything)
    await reward.start()
    try:
        return await reward.score(make_item(completion))
    finally:
        await reward.close()


@pytest.fixture
def listener() -> Any:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("connect", r"Machine is not on the network.*network access only if its source sets `network: true`"),
        ("by_path", r"Machine is not on the network"),
        ("by_name", r"name resolution.*network access only if its source sets `network: true`"),
        ("by_a_program", "CalledProcessError"),
    ],
)
async def test_a_function_opens_no_connection_and_is_told_why(
    target: str, listener: str, function: str, reason: str
) -> None:
    with pytest.raises(RewardError, match=reason):
        await score(target, function, listener)


@pytest.mark.parametrize("function", ["connect", "by_a_program"])
async def test_one_whose_source_says_so_opens_connections(target: str, listener: str, function: str) -> None:
    assert await score(target, function, listener, network=True) == 1.0


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("function", ["look_at_parent", "read_parent_memory", "signal_parent"])
async def test_a_function_reaches_no_other_process(target: str, function: str, network: bool) -> None:
    with pytest.raises(RewardError, match=r"Permission denied|Operation not permitted"):
        await score(target, function, "", network=network)


async def test_an_async_function_and_its_files_work_as_before(target: str) -> None:
    assert await score(target, "patient", "") == 1.0


async def test_a_function_sees_no_variable_but_harmless_ones_and_those_asked_for(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("STREAMRL_REDIS_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY", "NVIDIA_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "a secret")
    assert [await score(target, "variable", name) for name in secrets] == [0.0] * len(secrets)
    assert await score(target, "variable", "PATH") == 1.0
    assert await score(target, "variable", "JUDGE_KEY", environment=("JUDGE_KEY",)) == 1.0


@pytest.mark.parametrize(
    ("wish", "allowed", "remedy"),
    [
        ({"network": True}, {"reward_network": ("other.py:f",)}, r"rewards\.mine\.network: .*--allow-reward-network "),
        ({"environment": ("KEY",)}, {"reward_environment": ("OTHER",)}, r"environment: .*--allow-reward-env KEY$"),
    ],
)
def test_what_a_configuration_wishes_a_worker_must_allow(
    target: str, wish: Mapping[str, Any], allowed: Mapping[str, Any], remedy: str
) -> None:
    target = f"{target}:connect"
    source = schema.FunctionReward(type="function", target=target, **wish)
    with pytest.raises(ConfigError, match=remedy):
        build_function_reward("mine", source, Permissions(reward_code=(target,), **allowed))


def test_without_a_guard_of_the_kernel_only_what_is_built_in_runs() -> None:
    def refuse(**_: bool) -> None:
        raise OSError(38, "Function not implemented")

    guards = {"keep_apart": refuse, "forbid_calls": refuse}
    with pytest.raises(RuntimeError, match=r"Function not implemented.*`network: true`"):
        function_child.confine(own=True, network=False, **guards)
    function_child.confine(own=True, network=True, **guards)
    function_child.confine(own=False, network=False, **guards)


def test_what_holds_on_this_machine_is_told_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "1+1=", "answer": "2"}\n')
    words = ["model.path=none", f"data.train={tmp_path}/train.jsonl", "validation.every_steps=0"]
    words += ["data.validation=null", "rewards={exact: {type: function, target: exact_match}}", "reward_server=null"]
    config = load_config("reinforce.yaml", words).config
    command = [sys.executable, "-m", preflight.__name__]
    done = subprocess.run(
        command, input=config.model_dump_json(), capture_output=True, text=True, timeout=240, check=True
    )
    [told] = [json.loads(line) for line in done.stdout.splitlines() if "reward processes" in line]
    assert (told["level"], told["evidence"]) == ("ok", "no access to sockets and other processes"), (
        "of a guard's absence"
    )


def test_a_machine_without_a_guard_is_warned_of_with_a_remedy() -> None:
    told = preflight.confinement({"other processes": "Function not implemented"})
    assert (told.level, told.evidence) == ("warning", "not blocked: other processes (Function not implemented)")
    assert told.remedy
