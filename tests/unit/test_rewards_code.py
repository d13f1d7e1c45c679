"""Programs as rewards: the tests of a row, what each tells of a program, and errors that are not the program's."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.code import build_code_reward
from streamrl.workers.rewards.code_tests import CodeCase, cases_of, program_of
from tests.http_reward_world import until
from tests.sandbox_world import STARVED, children, keeper_of, outcomes, sandbox
from tests.tiny_rewards import make_item


# --- what is asked --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("held", "cases"),
    [
        ([{"input": "1\n", "output": "2\n"}], [CodeCase(stdin="1\n", expected="2\n")]),
        (
            {"inputs": ["1", "3"], "outputs": ["2", "4"]},
            [CodeCase(stdin="1", expected="2"), CodeCase(stdin="3", expected="4")],
        ),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [CodeCase(stdin="1", expected="2")]),
        (["assert f(1) == 2"], [CodeCase(then="assert f(1) == 2")]),
        ("assert f(1) == 2", [CodeCase(then="assert f(1) == 2")]),
        ('["assert f(1) == 2"]', [CodeCase(then="assert f(1) == 2")]),
        pytest.param("[" * 100_000, [CodeCase(then="[" * 100_000)], id="what nests too deep"),
        ('{"inputs": ["1"], "outputs": ["2"]}', [CodeCase(stdin="1", expected="2")]),
    ],
)
def test_tests_are_read_in_the_forms_that_datasets_have(held: Any, cases: list[CodeCase]) -> None:
    assert cases_of({"tests": held}, "tests") == cases


@pytest.mark.parametrize(
    "held",
    [
        [],
        "",
        3,
        None,
        [3],
        [{"input": "1"}],
        {"inputs": ["1"], "outputs": []},
        {"fn_name": "f"},
        [{"input": "[1]", "output": "1", "testtype": "functional"}],
    ],
)
async def test_a_row_without_tests_is_an_error_and_no_score(held: Any) -> None:
    with pytest.raises(RewardError, match="field 'tests' holds no tests"):
        await outcomes("pass", held)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("It is\n```py\nx = 4\n", "x = 4\n"),
        ("Use ```f(x)``` so:\n```python\nprint(1)\n```\n", "print(1)\n"),
        ("```\nx = 5\n```\nIt replaces ```f(`x`)```.", "x = 5\n"),
        ("```print(6)```", "```print(6)```"),
    ],
)
def test_the_program_is_the_last_block_of_a_completion(completion: str, program: str) -> None:
    assert program_of(completion) == program


# --- what is told ---------------------------------------------------------------------------------------------------
ADD = "def add(a, b):\n    return a + b\n"
ECHO = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2, ' ')\nprint()\n"


async def test_each_test_says_what_became_of_it() -> None:
    tests = ["assert add(2, 3) == 5", "assert add(1, 1) == 3, 'not three'", "add(1)"]

    first, second, third = await outcomes(ADD, tests)

    assert (first, second) == ("", "AssertionError: not three")
    assert "missing 1 required positional argument" in third


async def test_what_is_printed_counts_but_for_spaces_at_the_ends_of_lines() -> None:
    tests = {"inputs": ["1\n2\n", "3", "x"], "outputs": ["2\n4\n", "7\n", "?"]}

    passed, wrong, raised = await outcomes(ECHO, tests)

    assert (passed, wrong) == ("", "printed '6', not '7'")
    assert "ValueError: invalid literal for int()" in raised
    assert "(line 3 of the program)" in raised


@pytest.mark.parametrize(("partial", "score"), [(False, 0.0), (True, 0.5)])
async def test_the_score_is_of_all_tests_or_the_share_that_passes(partial: bool, score: float) -> None:
    async with sandbox(partial=partial) as reward:
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 3", "assert add(1, 1) == 2"])) == score
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 2"])) == 1.0


@pytest.mark.parametrize("ending", ["exit()", "raise SystemExit", "import os; os._exit(0)", "quit(0)"])
async def test_a_program_that_ends_itself_before_its_test_has_not_passed(ending: str) -> None:
    ending = ending.replace("exit()", "import sys; sys.exit()").replace("quit(0)", "import sys; sys.exit(0)")

    [why] = await outcomes(f"{ADD}{ending}", ["assert add(1, 1) == 2"])

    assert why == "exited with status 0"


async def test_a_program_may_end_itself_when_it_has_printed() -> None:
    case = [{"input": "", "output": "5"}]

    assert await outcomes("print(5, flush=True)\nimport os\nos._exit(0)", case) == [""]
    assert await outcomes("print(5)\nraise SystemExit(1)", case) == ["exited with status 1"]


async def test_threads_event_loops_and_main_blocks_work() -> None:
    program = """
import asyncio, threading
async def say(): await asyncio.sleep(0.01); print("loop")
if __name__ == "__main__":
    asyncio.run(say())
    threading.Thread(target=lambda: print("thread")).start()
"""
    assert await outcomes(program, [{"input": "", "output": "loop\nthread\n"}]) == [""]


# --- what is no word of the program ---------------------------------------------------------------------------------
async def test_a_keeper_that_dies_is_an_error_and_the_next_program_has_another() -> None:
    async with sandbox(time_s=30.0) as reward:
        running = asyncio.create_task(reward.score(make_item("while True: pass", tests=["pass"])))
        await until(lambda: reward._cells._keeper and children(keeper_of(reward)), "its cell")
        os.kill(keeper_of(reward), signal.SIGKILL)

        with pytest.raises(RewardError, match="the sandbox failed: the process ended"):
            await running
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 2"])) == 1.0


async def test_a_keeper_that_cannot_be_started_for_a_moment_is_no_mistake_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with sandbox() as reward:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", refuse)
            with pytest.raises(RewardError, match=r"no process could be started: .*temporarily unavailable"):
                await reward.start()
        await reward.start()


async def test_a_cell_that_others_kill_is_an_error() -> None:
    async with sandbox(time_s=30.0) as reward:
        running = asyncio.create_task(reward.score(make_item("while True: pass", tests=["pass"])))
        [cell] = await until(lambda: reward._cells._keeper and children(keeper_of(reward)), "its cell")
        os.kill(cell, signal.SIGKILL)

        with pytest.raises(RewardError, match="killed from outside"):
            await running


async def test_a_program_that_the_machine_had_no_time_for_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"the machine was too busy: no 0\.1 s of CPU time for it in 0\.3 s"):
        await outcomes("while True: pass", ["pass"], keeper=STARVED, timeout_s=0.3, time_s=0.1)


def test_a_worker_must_be_told_that_it_may_run_programs() -> None:
    source = schema.CodeReward(type="code")
    with pytest.raises(ConfigError, match=r"rewards\.mine: .*--allow-reward-code sandbox"):
        build_code_reward("mine", source, Permissions())
    build_code_reward("mine", source, Permissions(reward_code=("sandbox",)))
