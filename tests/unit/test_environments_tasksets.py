"""Tasksets of verifiers, as far as they are our affair: a double of the package, by this interpreter, in the place of
the real one, which has a test of its own (`tests/integration/test_verifiers.py`)."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, SampleError
from streamrl.ops.cli.main import main
from tests.helpers import wait_until
from tests.session_world import AgentWorld, world_of

# Of the real package's interface, what the program that is run uses; what a task is to do stands in it.
DOUBLE = """
import asyncio, json, os, pathlib, sys, urllib.request
from types import SimpleNamespace as Space

class Model(Space):
    def model_dump(self, **_):
        return dict(vars(self), prompt=self.prompt)

class AgentConfig(Space):
    pass

class EvalClientConfig(Space):
    pass

class SamplingConfig(Space):
    pass

def env_config_type(taskset, env):
    if taskset != "doubled":
        raise ModuleNotFoundError(f"taskset {taskset!r} not found", name=taskset)
    role = AgentConfig(model_fields_set=(), harness=None)
    return Space(model_fields={"agent": Space(default=role), "timeout": Space(default=1)})

def default_harness_id(taskset):
    return "bash"

def resolve_env_config(env):
    pathlib.Path("env.json").write_text(json.dumps(env))
    return Space(taskset=Space(**env["taskset"]))

def load_taskset(taskset):
    for number in range(taskset.size):
        print("a taskset prints")
        yield Space(data=Model(idx=number, name=None, system_prompt="Add, \\u0416.", prompt=f"{number} + 1"))

class EnvServer:
    def __init__(self, config, address):
        self.address = address
        print("the server prints")
        pathlib.Path(f"server-{os.getpid()}").touch()

    async def run(self):
        await asyncio.sleep(3600)

class EnvClient:
    def __init__(self, address):
        assert address.startswith("ipc:///tmp/")

    async def wait_for_server_startup(self, interval):
        pass

    async def close(self):
        pass

    async def run(self, client, model, sampling, task_data):
        said = await asyncio.to_thread(ask, client, task_data["prompt"])
        what = task_data.get("what")
        if what == "raise": raise KeyError("what")
        if what == "exit": os._exit(3)
        errors = [Space(type="TaskError", message="no")]
        if what == "fail": return Space(ok=False, errors=[], traces=[Space(errors=errors)])
        if what == "nothing": return Space(ok=True, traces=[Space(rewards={})])
        if what == "hang":
            try: await asyncio.sleep(3600)
            finally: pathlib.Path("cancelled").touch()
        right = float(said == task_data["answer"])
        return Space(ok=True, traces=[Space(rewards={"right": Space(value=right), "none": None}),
                                      Space(rewards={"right": Space(value=0.25)})])

def ask(client, prompt):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
    headers = {"authorization": "Bearer EMPTY", "content-type": "application/json", **client.headers}
    request = urllib.request.Request(client.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]
"""
TYPES = "def content_text(content):\n    return content\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "verifiers" / "v1").mkdir(parents=True)
    (tmp_path / "verifiers" / "__init__.py").touch()
    (tmp_path / "verifiers" / "v1" / "__init__.py").write_text(DOUBLE)
    (tmp_path / "verifiers" / "v1" / "serve.py").write_text("from verifiers.v1 import EnvClient, EnvServer\n")
    (tmp_path / "verifiers" / "v1" / "types.py").write_text(TYPES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(**changes: Any) -> AbstractAsyncContextManager[AgentWorld]:
    options = {"python": sys.executable, "taskset": "doubled"}
    return world_of("verifiers", **{"network": True, "options": options, **changes})


def task(**more: Any) -> dict[str, Any]:
    return {"verifiers": {"prompt": "2 + 3", "answer": "5", **more}}


def servers(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("server-*")]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # also one that is buried while it is read (ESRCH)
        return False


async def test_what_the_server_asks_is_the_rollout_and_rewards_keep_their_names(folder: Path) -> None:
    async with played() as world:
        rollouts = await asyncio.gather(*(world.play(lambda _: "5", task()) for _ in range(8)))

        assert [rollout.reward for rollout, _ in rollouts] == [1.25] * 8
        assert rollouts[0][0].rewards == {"environment.right": 1.25}
        assert all(len(engine.requests) == 1 for _, engine in rollouts), "each has a session of its own"
        assert (len(servers(folder)), world.num_open) == (1, 0), "one server plays all of them"


async def test_roles_run_here_and_have_no_shell_unless_somebody_says_so(folder: Path) -> None:
    async with played():
        written = json.loads((folder / "env.json").read_text())
    assert written == {
        "taskset": {"id": "doubled"},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
    }
    bash = {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}, "id": "best-of-n"}
    options = {"python": sys.executable, "taskset": {"id": "doubled", "size": 3}, **bash}
    async with played(options=options):
        assert json.loads((folder / "env.json").read_text()) == {"taskset": {"id": "doubled", "size": 3}, **bash}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise", "the agent failed: RuntimeError: KeyError: 'what'"),
        ("fail", "the agent failed: RuntimeError: TaskError: no"),
        ("nothing", "the task returned no reward"),
        ("exit", "the process ended"),
    ],
)
async def test_a_task_that_goes_wrong_costs_its_rollout_and_no_later_one(folder: Path, what: str, told: str) -> None:
    async with played() as world:
        with pytest.raises(SampleError, match=told):
            await world.play(lambda _: "5", task(what=what))
        rollout, _ = await world.play(lambda _: "5", task())
        assert (rollout.reward, world.num_open) == (1.25, 0)


async def test_a_task_that_hangs_is_given_up_in_the_server_too(folder: Path) -> None:
    async with played(timeout_s=1.0) as world:
        with pytest.raises(SampleError, match=r"sent no request for 1 s \(environment.timeout_s\)"):
            await world.play(lambda _: "5", task(what="hang"))
        await asyncio.to_thread(wait_until, (folder / "cancelled").exists, description="the server is told")
        rollout, _ = await world.play(lambda _: "5", task())
        assert (rollout.reward, len(servers(folder))) == (1.25, 1), "its process goes on"


async def test_a_row_without_a_task_is_told_how_to_get_one(folder: Path) -> None:
    async with played() as world:
        with pytest.raises(SampleError, match="make rows with `streamrl environment tasks`"):
            await world.play(lambda _: "5", {})


async def test_no_server_outlives_its_worker(folder: Path) -> None:
    async with played():
        (pid,) = servers(folder)
        assert lives(pid)
    wait_until(lambda: not lives(pid), description="the server has ended")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"taskset": "doubled"}, "missing a required argument: 'python'"),
        (
            {"python": "no/python", "taskset": "doubled"},
            r"'no/python' cannot be run .* `uv venv FOLDER` and `uv pip install",
        ),
        ({"python": sys.executable, "taskset": "other"}, "ModuleNotFoundError: taskset 'other' not found"),
    ],
)
async def test_a_mistake_is_told_before_anything_is_played(folder: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        async with played(options=options):
            pass


async def test_an_interpreter_without_verifiers_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"has no verifiers 0.4 .*: `uv pip install --python .* verifiers==0.4.0 uv`"):
        async with played():
            pass


def test_tasks_are_made_into_prompts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["environment", "tasks", "doubled", "--python", sys.executable, "--option", "size=5", "--first", "3"]
    assert main(words) == 0
    told = capfd.readouterr().out
    assert told.isascii(), "the same in any locale"
    rows = [json.loads(line) for line in told.splitlines()]
    assert [row["verifiers"]["idx"] for row in rows] == [3, 4]
    assert rows[0]["messages"] == [{"role": "system", "content": "Add, Ж."}, {"role": "user", "content": "3 + 1"}]

    assert main(["environment", "tasks", "other", "--python", sys.executable]) != 0
    assert "taskset other: ModuleNotFoundError: taskset 'other' not found" in capfd.readouterr().err
