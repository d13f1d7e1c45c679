"""The calculator of the example: what it makes of a call, and what its agent is paid for."""

from __future__ import annotations

import pytest

from streamrl.demos.calculator import calculate
from tests.session_world import world_of

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12 + 35"}}</tool_call>'
ROW = {"messages": [{"role": "user", "content": "Calculate 12 + 35."}], "answer": "47", "metadata": {}}


def called(expression: object, name: str = "calculate") -> str:
    return f'{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}'


@pytest.mark.parametrize(("expression", "result"), [("12 + 35", "47"), ("12-35", "-23"), (" 3 * 4 ", "12")])
def test_it_calculates_two_numbers(expression: str, result: str) -> None:
    assert calculate(called(expression)) == result


@pytest.mark.parametrize(
    "call",
    ["", "[]", '"x"', "{" * 100_000, called("1 + 2", name="add"), called("2 ** 99"), called("9" * 99 + " + 1"), "{}"],
)
def test_what_is_no_call_of_it_is_told_what_one_is(call: str) -> None:
    assert calculate(call).startswith("error: calculate takes an expression of two numbers")


@pytest.mark.parametrize(
    ("said", "rewards"),
    [
        ([CALL, "The answer is 47."], {"right": 1.0, "called": 0.1}),
        (["The answer is 47."], {"right": 1.0, "called": 0.0}),
        ([CALL, "The answer is 48."], {"right": 0.0, "called": 0.1}),
        ([CALL, CALL], {"right": 0.0, "called": 0.1}),
        (["<tool_call>12 + 35</tool_call>", "I see."], {"right": 0.0, "called": 0.0}),
    ],
)
async def test_its_agent_is_paid_for_what_is_right_and_a_little_for_a_call(
    said: list[str], rewards: dict[str, float]
) -> None:
    async with world_of("streamrl.demos.calculator:rollout") as world:
        played, engine = await world.play(lambda asked: said[len(asked) - 1], ROW)
    assert played.rewards == {f"environment.{name}": reward for name, reward in rewards.items()}
    assert len(engine.requests) == len(said)
    told = world.facts.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert ("<tool_response>47</tool_response>" in told) == (said[0] == CALL)
