"""The package verifiers itself, in an environment of its own: a taskset with a tool, played by its server and a harness
of its own against sessions, and trained by a whole run; and its client of tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import SampleError
from tests.brute_force import check_by_brute_force
from tests.own_packages import call, python_with, two_steps
from tests.session_world import world_of, write_calling_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TASKSET = '''
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

class SumsData(vf.TaskData):
    answer: str

class SumsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    has_tool: bool = True

class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)] if config.has_tool else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "fails":
            raise KeyError("nothing to compare with")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0

class SumsConfig(vf.TasksetConfig):
    size: int = 40
    task: SumsTaskConfig = SumsTaskConfig()

class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.size):
            yield SumsTask(SumsData(prompt=f"{n} + 3", answer=str(n + 3)), self.config.task)

__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    Adder.run()
'''
_FETCHES = ("SSL_CERT_FILE",)  # a harness fetches its packages once, maybe past a proxy
_SETTINGS: dict[str, Any] = {"network": True, "environment": _FETCHES, "timeout_s": 200.0, "max_tokens": 8192}
CALL = '<tool_call>{"name": "sums_add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("verifiers==0.4.0", "uv", beside_ours=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sums_v1.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_a_taskset_with_a_tool_is_played_and_what_was_sampled_is_trained(python: Path, folder: Path) -> None:
    task = {"verifiers": {"prompt": "2 + 3", "answer": "5"}}
    options = {"python": str(python), "taskset": {"id": "sums-v1", "size": 2}}
    async with world_of("verifiers", options=options, **_SETTINGS) as world:
        rollouts = await asyncio.gather(
            *(world.play(lambda asked: CALL if len(asked) == 1 else "It is 5.", task) for _ in range(3))
        )
        for rollout, engine in rollouts:
            assert rollout.rewards == {"environment.right": 2.0, "environment.brief": 0.5}
            assert rollout.num_tool_calls == 1
            (first, called), (second, _) = engine.said
            so_far = [*first, *called.token_ids.tolist()]
            assert second[: len(so_far)] == so_far, "what was sampled stays as it was"
            assert "<tool_response>5</tool_response>" in world.facts.tokenizer.decode(second[len(so_far) :])
            check_by_brute_force(world.ticket({}).token_ids.tolist(), rollout.sample, engine.said)
        with pytest.raises(SampleError, match="nothing to compare with"):
            await world.play(lambda _: "5", {"verifiers": {"prompt": "2 + 3", "answer": "fails"}})
        with pytest.raises(SampleError, match="answer"):
            await world.play(lambda _: "5", {"verifiers": {"prompt": "2 + 3"}})


async def test_a_rollout_that_runs_into_its_bound_counts_as_unfinished(python: Path, folder: Path) -> None:
    options = {"python": str(python), "taskset": "sums-v1"}
    async with world_of("verifiers", options=options, **_SETTINGS, max_turns=2) as world:
        rollout, _ = await world.play(lambda _: CALL, {"verifiers": {"prompt": "2 + 3", "answer": "5"}})
        assert (rollout.sample.finish_reason, rollout.reward) == ("length", 0.0)


# As verifiers' client of tokens is called by its trainer, with a prompt that is there already.
GENERATE = """
import asyncio, json, sys
from types import SimpleNamespace
from openai import AsyncOpenAI
from renderers.client import generate

async def main():
    url, key, token_ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    renderer = SimpleNamespace(
        supports_tools=True,
        get_stop_token_ids=lambda: [3],
        parse_response=lambda ids, **_: SimpleNamespace(
            content="", reasoning_content=None, tool_calls=[], reasoning_complete=True
        ),
    )
    client = AsyncOpenAI(base_url=url, api_key=key)
    made = await generate(client=client, renderer=renderer, messages=[], model="m", prompt_ids=token_ids)
    print(json.dumps({name: made[name] for name in ("completion_ids", "completion_logprobs", "finish_reason")}))

asyncio.run(main())
"""
AGENT = """
import asyncio, json

async def rollout(session, row):
    words = (row["python"], "-c", row["program"], session.base_url, session.api_key, "[5, 6, 7]")
    program = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    told, _ = await program.communicate()
    open(row["place"], "wb").write(told)
    return 1.0
"""


async def test_its_client_of_tokens_takes_what_generate_answers(python: Path, folder: Path) -> None:
    (folder / "agent.py").write_text(AGENT)
    row = {"python": str(python), "program": GENERATE, "place": str(folder / "told")}
    async with world_of(f"{folder}/agent.py:rollout", network=True) as world:
        _, engine = await world.play(lambda _: "well", row)
    told = json.loads((folder / "told").read_text())
    [(asked, made)] = engine.said
    assert asked == [5, 6, 7]
    assert told["completion_ids"] == made.token_ids.tolist()
    assert told["completion_logprobs"] == pytest.approx(made.logprobs.tolist())
    assert told["finish_reason"] == "stop"


def test_a_run_trains_a_taskset_and_loses_nothing(python: Path, folder: Path) -> None:
    write_calling_model(folder / "base")
    for name, first in (("train", 0), ("held-out", 32)):
        words = ["environment", "tasks", "sums-v1", "--python", str(python), "--first", str(first), "--count", "32"]
        made = call(Path(sys.executable), folder, "-m", "streamrl.ops.cli.main", *words)
        assert made.returncode == 0, made.stderr
        (folder / f"{name}.jsonl").write_text(made.stdout)
    written = f"""
data: {{train: train.jsonl, validation: held-out.jsonl, max_prompt_tokens: 64}}
environment:
  target: verifiers
  network: true
  environment: {list(_FETCHES)}
  options: {{python: {python}, taskset: {{id: sums-v1, task: {{has_tool: false}}}}}}
  max_turns: 2
  max_tokens: 300
  timeout_s: 200
sampling: {{num_samples: 2, max_tokens: 6}}
training: {{groups_per_step: 2}}
validation: {{max_prompts: 2, sampling: {{max_tokens: 6}}}}
"""
    told = two_steps(Path(sys.executable), folder, written)["held_out"]
    assert set(told) == {"environment", "environment.right", "environment.brief"}
