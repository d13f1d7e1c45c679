"""An agent written with the openai package and a tool, not changed for us, trained by a whole run: Redis, workers, an
engine, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import temporary_files, wait_until
from tests.integration.test_up import worker_pid
from tests.session_world import chat_tokenizer, write_calling_model

ROOT = Path(__file__).resolve().parents[2]
RUN_HERE: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "timeout": 300}
AGENT = """
import json
from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]

async def calculator(session, row):
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages, called = list(row["messages"]), 0.0
    for _ in range(3):
        answer = await client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        called = 1.0
        for call in message.tool_calls:
            wanted = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(wanted["a"] + wanted["b"])})
    return {"called": called, "right": float(message.content == row["answer"])}
"""
CONFIG = """
name: agents
dir: {dir}
model: {{path: {dir}/model, dtype: float32}}
data: {{train: {dir}/sums.jsonl, max_prompt_tokens: 64}}
sampling: {{num_samples: 4, max_tokens: 6}}
environment: {{target: "{dir}/agent.py:calculator", max_turns: 3, max_tokens: 400, timeout_s: 60.0}}
optimizer: {{lr: 3e-3, min_lr: 3e-3, warmup_steps: 0}}
training: {{groups_per_step: 4, max_steps: 8}}
weights: {{dtype: float32}}
checkpoint: {{every_steps: 4}}
validation: {{every_steps: 0, at_start: false, at_end: false}}
worker: {{threads: 1, grace_s: 2.0}}
learner: {{threads: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_calling_model(tmp_path / "model")
    # At first six of seven groups have answers that are all alike, and are dropped: 400 were once too few for 16 steps.
    rows = [{"messages": [{"role": "user", "content": f"{n} + 3"}], "answer": "5"} for n in range(4000)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "agents.yaml").write_text(CONFIG.format(dir=tmp_path))
    with tempfile.TemporaryDirectory(prefix="agents-", dir="/tmp") as temporary:  # a short path, for sockets
        monkeypatch.setenv("TMPDIR", temporary)
        yield tmp_path
        assert temporary_files(temporary) == []


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    words = ["-m", "streamrl.ops.cli.main", "up", str(folder / "agents.yaml"), "--json", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def steps(folder: Path) -> list[dict[str, Any]]:
    metrics = folder / "agents" / "metrics.jsonl"
    lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
    return [line for line in map(json.loads, lines) if "train_optim/optim_step" in line]


@pytest.mark.timeout(600)  # a minute or two of a quiet machine, by how soon it learns
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_an_agent_of_the_openai_package_learns_to_call_its_tool(folder: Path, engine: str) -> None:
    # The mean of four steps has a standard deviation of 0.12. The second four gain 0.2 on the first, and gained 0 once;
    # the fourth four 0.6 (two seeds).
    summary = finish(start(folder, f"worker.engine={engine}", "training.max_steps=16"))
    assert (summary["state"], summary["steps"], summary["dead"]) == ("finished", 16, 0)
    assert (summary["lost"], summary["twice"], summary["clean"]) == (0, 0, True)
    rewards = [step["train_rollouts/rewards"] for step in steps(folder)]
    assert sum(rewards[-4:]) > sum(rewards[:4]), rewards


@pytest.mark.long
def test_a_worker_that_is_killed_in_mid_episode_costs_no_ticket(folder: Path) -> None:
    # Who has learnt to call its tool always does: all groups are trained, else there are no 30 steps in the data.
    process = start(folder, "worker.engine=transformers", "training.max_steps=30", "algorithm.drop_zero_variance=false")
    for killed in range(2):
        before = len(steps(folder))
        wait_until(lambda: len(steps(folder)) >= before + 3, description="three steps", timeout_s=240)  # noqa: B023
        pid = worker_pid(folder)
        assert pid is not None, killed
        os.kill(pid, signal.SIGKILL)
    summary = finish(process)
    assert summary["restarts"] == {"worker/0": 2}
    assert (summary["state"], summary["steps"]) == ("finished", 30)
    assert (summary["lost"], summary["twice"], summary["clean"]) == (0, 0, True)


# Tells its key wherever it can: to the model, in an address, to the server's errors, to whoever reads of its failure.
LEAKY = """
import urllib.error, urllib.request, json

def ask(session, path, body):
    headers = {"authorization": "Bearer " + session.api_key, "content-type": "application/json"}
    request = urllib.request.Request(session.base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]

def leaky(session, row):
    with open("DIR/keys", "a") as keys: keys.write(session.api_key + "\\n")
    said = "GET " + session.base_url + " with " + session.api_key
    hello = [{"role": "user", "content": said}]
    ask(session, "/chat/completions?key=" + session.api_key, {"model": session.api_key, "messages": hello})
    for path, body in (("/chat/completions", {"messages": hello, "n": said}), ("/no/" + session.api_key, {})):
        try: ask(session, path, body)
        except urllib.error.HTTPError as error: assert session.api_key not in error.read().decode()
    if int(row["answer"]) % 3 == 0: raise ValueError(said)
    return float(int(row["answer"]) % 2)
"""
# It writes what it is given into the worker's log.
TOLD = """
def told(prompt, completion, token_ids, fields):
    print("told", repr(completion))
    return float(sum(token_ids) % 7)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key_in_url", [False, True])
def test_no_key_of_a_session_is_in_anything_that_a_run_writes(folder: Path, key_in_url: bool) -> None:
    write_calling_model(folder / "model", chat_tokenizer())
    (folder / "agent.py").write_text(LEAKY.replace("DIR", str(folder)))
    (folder / "rewards.py").write_text(TOLD)
    rows = [{"messages": [{"role": "user", "content": f"{n} + 3"}], "answer": str(n)} for n in range(400)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    leaky = f"{{target: '{folder}/agent.py:leaky', max_turns: 3, max_tokens: 900, timeout_s: 60.0, "
    running = start(
        folder,
        "worker.engine=transformers",
        "training={groups_per_step: 2, max_steps: 150}",
        f"environment={leaky} network: true, key_in_url: {str(key_in_url).lower()}}}",
        f"rewards={{told: {{type: function, target: '{folder}/rewards.py:told'}}}}",
    )
    record = [sys.executable, "-m", "streamrl.ops.cli.main", "record"]
    try:
        wait_until(lambda: len(steps(folder)) >= 1 or running.poll() is not None, description="a step", timeout_s=240)
        into = ["--once", "--output", str(folder / "recording")]
        saved = subprocess.run([*record, str(folder / "agents"), *into], **RUN_HERE)
    finally:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=300)
    assert saved.returncode == 0, saved.stderr + err
    exported = subprocess.run([*record, "export", str(folder / "recording")], **RUN_HERE)
    assert exported.returncode == 0, exported.stderr

    keys = (folder / "keys").read_text().split()
    places = [path for path in folder.rglob("*") if path.is_file() and path.name != "keys"]
    written = {str(path): path.read_bytes().decode(errors="replace") for path in places}
    written |= {"up": out + err, "record": saved.stdout + saved.stderr, "export": exported.stdout}
    assert [place for place, text in written.items() if any(key in text for key in keys)] == []
    assert len(keys) >= 2 * 2 * 4
    assert "with [key]" in exported.stdout, "what was said has come through, but for the key"
    logs = "".join(text for place, text in written.items() if place.endswith((".log", ".out")))
    assert "told 'GET http" in logs
    assert "with [key]" in logs
    assert any("ValueError: GET http" in text for text in written.values()), "so has the failure"
