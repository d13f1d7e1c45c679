"""The package verifiers itself, in an environment of its own: a taskset with a tool, played by its server and a harness of
its own against sessions, and trained by a whole run; and its client of tokens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, SampleError
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import SampleRequest
from tests.brute_force import check_by_brute_force

from tests.own_packages import environment, python_with, two_steps
from tests.session_world import world_of

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

class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]

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
    settings = {"network": True, "environment": _FETCHES, "timeout_s": 200.0, "max_tokens": 8192}
    async with world_of("verifiers", options=options, **settings) as world:
        rollouts = await asyncio.gather(
            *(world.play(lambda asked: CALL if len(asked) == 1 else "It is 5.", task) for _ in range(2))
        )
        for rollout, engine in rollouts:
            assert rollout.rewards == {"environment.right": 2.0, "environment.brief": 0.5}
            assert rollout.num_tool_calls == 1
            first, second = (request.prompt_ids.tolist() for request in engine.requests)
            told = world.facts.tokenizer.decode(second[len(first) :])
            print(told)
            check_by_brute_force(world.ticket({}).token_ids.tolist(), rollout.sample, engine.said)
        with pytest.raises(SampleError, match="KeyError"):
            await world.play(lambda _: "5", {"verifiers": {"prompt": "2 + 3", "answer": "fails"}})
