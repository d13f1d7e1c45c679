"""The trial of a run's rewards and environment before it starts: what would work in the run passes, and what would fail
on every sample is told."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.finding import Finding
from streamrl.ops.monitor.doctor.trials import try_rewards
from tests.judging_world import judges_serving

DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"
CODE = """
def math(completions, task, **kwargs):
    return [1.0 if one == "math" else None for one in task]

def code(completions, task, **kwargs):
    return [0.5 if one == "code" else None for one in task]

def reads(completions, rewards, **kwargs):
    assert len(completions) == 2
    return [sum(of[name] for name in ("right", "judge")) for of in rewards]

def misreads(completions, rewards, **kwargs):
    return [of["write"] for of in rewards]

class Play:
    def reset(self, row):
        return row.get("opening")
    def step(self, completion):
        return "go on", 0.5, False

class Broken(Play):
    def reset(self, row):
        raise RuntimeError("the board is missing")

class Silent(Play):
    def step(self, completion):
        return None, 0.5, False
"""
RIGHT = {"type": "function", "target": "numeric_match"}


@pytest.fixture(autouse=True)
def working_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    [of_groups] = re.findall(r"```python\n# of_groups\.py\n(.*?)```", DOCS.read_text(), re.DOTALL)
    Path("of_groups.py").write_text(of_groups)


def tried(settings: dict[str, Any], *files: list[dict[str, Any]], ask_services: bool = False) -> dict[str, Finding]:
    """What is found about rewards and environment, by name."""
    train = {}
    for number, rows in enumerate(files):
        Path(f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        train[f"set{number}"] = {"path": f"{number}.jsonl"}
    config = {"model": {"path": "none"}, "data": {"train": train}, **settings}
    Path("run.yaml").write_text(json.dumps(config))
    found = {finding.name: finding for finding in try_rewards(load_config("run.yaml"), ask_services=ask_services)}
    found.pop("reward processes", None)  # what this machine's kernel can keep from them
    return found


def mine(target: str, **settings: Any) -> dict[str, Any]:
    return {"type": "function", "target": target, **settings}


def one_of(found: dict[str, Finding]) -> tuple[str, str, str]:
    [finding] = found.values()
    return finding.name, finding.level, finding.evidence


def test_a_group_function_reads_the_other_sources_scores_of_two_samples() -> None:
    shorter = mine("of_groups.py:shorter", of_group=True, weight=0.2)
    found = tried({"rewards": {"shorter": shorter, "right": RIGHT}}, [{"text": "6*7=", "answer": "42"}])
    assert {name: (one.level, one.evidence) for name, one in found.items()} == {
        "reward right": ("ok", "1 for a made-up completion of 0.jsonl:1"),
        "reward shorter": ("ok", "0 for a made-up completion of 0.jsonl:1"),
    }


def test_a_service_that_is_not_asked_is_worth_1_to_a_group_function() -> None:
    judge = {"type": "http", "url": "http://127.0.0.1:9"}
    rewards = {"reads": mine("mine.py:reads", of_group=True), "right": RIGHT, "judge": judge}
    found = tried({"rewards": rewards}, [{"text": "1+1=", "answer": "2"}])
    assert (found["reward reads"].level, found["reward reads"].evidence[:2]) == ("ok", "1 ")


def test_a_group_function_that_reads_what_no_source_gives_is_told_which_there_are() -> None:
    rewards = {"misreads": mine("mine.py:misreads", of_group=True), "right": RIGHT}
    found = tried({"rewards": rewards}, [{"text": "1+1=", "answer": "2"}])["reward misreads"]
    assert (found.level, "KeyError: 'write'" in found.evidence) == ("error", True)
    assert found.evidence.endswith("the row's fields: answer; the sample's rewards: right")


def test_functions_that_each_apply_to_other_rows_pass() -> None:
    rewards = {name: mine(f"mine.py:{name}") for name in ("math", "code")}
    found = tried({"rewards": rewards}, [{"text": "a", "task": "math"}], [{"text": "b", "task": "code"}])
    assert {name: (one.level, one.evidence) for name, one in found.items()} == {
        "reward math": ("ok", "does not apply to a made-up completion of 1.jsonl:1"),
        "reward code": ("ok", "0.5 for a made-up completion of 1.jsonl:1"),
    }


def test_a_row_that_no_source_applies_to_is_told() -> None:
    found = tried({"rewards": {"math": mine("mine.py:math")}}, [{"text": "a", "task": "poem"}])
    assert found["reward math"].level == "ok"
    assert (found["rewards"].level, "no reward applies" in found["rewards"].evidence) == ("warning", True)
    assert "0.jsonl:1" in found["rewards"].evidence


def test_a_held_out_row_that_no_source_applies_to_is_told_also_where_a_teacher_teaches_the_others() -> None:
    """A teacher scores no validation."""
    Path("held.jsonl").write_text('{"text": "b", "task": "poem"}\n')
    settings = {"rewards": {"math": mine("mine.py:math")}, "teacher": {"path": "wise"}}
    poem = [{"text": "a", "task": "poem"}]
    assert "rewards" not in tried(settings, poem)
    found = tried({**settings, "data": {"train": "0.jsonl", "validation": "held.jsonl"}}, poem)
    assert found["reward math"].level == "ok"
    assert (found["rewards"].level, "held.jsonl:1" in found["rewards"].evidence) == ("warning", True)


async def test_a_judge_of_pairs_is_asked_for_its_score_of_two() -> None:
    async with judges_serving() as judges:
        judge = {"url": judges.url, "model": "wise"}
        pairs = {"type": "judge", "form": "pairwise", "rubric": "It is right.", "judges": {"one": judge}}
        found = await asyncio.to_thread(tried, {"rewards": {"pairs": pairs}}, [{"text": "a"}], ask_services=True)
        assert one_of(found) == ("reward pairs", "ok", "0.5 for a made-up completion of 0.jsonl:1")
        assert {len(asked.answers) for asked in judges.asked} == {2}


def test_an_environment_without_a_function_beside_it_is_tried() -> None:
    found = tried({"environment": {"target": "mine.py:Broken"}}, [{"text": "play"}])
    name, level, evidence = one_of(found)
    assert (name, level) == ("environment", "error")
    assert "environment.target = 'mine.py:Broken' fails for 0.jsonl:1" in evidence
    assert "the board is missing" in evidence


def test_tests_of_programs_are_tried_without_a_function_beside_them() -> None:
    found = tried({"rewards": {"right": {"type": "code"}}}, [{"text": "Write add."}])
    name, level, evidence = one_of(found)
    assert (name, level) == ("reward right", "error")
    assert "rewards.right.tests.field = 'tests' fails for 0.jsonl:1" in evidence


@pytest.mark.parametrize(
    ("target", "row", "told"),
    [
        ("Play", {"messages": [{"role": "user", "content": "hi"}], "opening": "you start"}, "reset() must return None"),
        ("Play", {"messages": [{"role": "user", "content": "hi"}]}, ""),
        ("Play", {"text": "hi", "opening": "you start"}, ""),
        ("Silent", {"text": "hi"}, "step() returned no observation, but is not done"),
        ("Silent", {"messages": [{"role": "user", "content": "hi"}]}, ""),
    ],
)
def test_a_turn_that_no_rollout_could_go_on_from_is_told(target: str, row: dict[str, Any], told: str) -> None:
    _, level, evidence = one_of(tried({"environment": {"target": f"mine.py:{target}"}}, [row]))
    assert (level, told in evidence) == ("error" if told else "ok", True)


def test_a_run_of_one_turn_needs_no_observation() -> None:
    found = tried({"environment": {"target": "mine.py:Silent", "max_turns": 1}}, [{"text": "hi"}])
    assert one_of(found)[1] == "ok"


def test_of_a_run_without_rewards_there_is_nothing_to_try() -> None:
    assert tried({"teacher": {"path": "wise"}}, [{"text": "hi"}], ask_services=True) == {}


def test_an_environment_behind_an_address_is_asked_where_there_are_no_rewards() -> None:
    environment = {"urls": ["http://127.0.0.1:9"], "timeout_s": 0.2}
    assert tried({"environment": environment}, [{"text": "hi"}]) == {}
    name, level, evidence = one_of(tried({"environment": environment}, [{"text": "hi"}], ask_services=True))
    assert (name, level, "no replica of the environment answered" in evidence) == ("environment", "error", True)
