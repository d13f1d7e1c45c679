"""A tool for a pretrained model: an agent that uses the openai package and offers a calculator for the demo's sums.

    Calculate 12 + 35.  ──► <tool_call>{"name": "calculate", ...}</tool_call>  ──► 47  ──► The answer is 47.

The model's own chat template has no tools, as is common with small models. So a system message describes the
calculator, two examples show its use (with one the model never calls it, with two every other time), and the call is
parsed from the answer. With a template that has tools, `tools=[...]` does all of that (docs/environments.md).

`streamrl demo` makes the model and the questions; `streamrl up conf/calculator.yaml` trains this agent on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from streamrl.recipe.rewards import numeric_match

_SYSTEM_PROMPT = "You have a calculator. Write one call of it, and then say what it tells you."
_EXAMPLES = {"51 + 8": "59", "6 + 27": "33"}
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SUM = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")
_NO_CALL = "error: calculate takes an expression of two numbers, such as 51 + 8"
_FOR_A_CALL = 0.1  # for a valid call: less than for any right answer


class _Session(Protocol):
    base_url: str
    api_key: str
    model: str


async def rollout(session: _Session, row: Mapping[str, Any]) -> dict[str, float]:
    from openai import AsyncOpenAI  # comes with vLLM

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = [*_opening(), *row["messages"]]
        called = False
        for _ in range(2):
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            text = answer.choices[0].message.content or ""
            call = _CALL.search(text)
            if call is None:
                break
            result = calculate(call[1])
            called = called or result != _NO_CALL
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": _response(result)}]
    return {"right": numeric_match("", text, (), row) if call is None else 0.0, "called": _FOR_A_CALL * called}


def calculate(call: str) -> str:
    try:
        wanted = json.loads(call)
        name, expression = wanted["name"], wanted["arguments"]["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return _NO_CALL
    found = _SUM.fullmatch(str(expression))
    if name != "calculate" or found is None:
        return _NO_CALL
    left, right = int(found[1]), int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[found[2]])


def _opening() -> Iterator[dict[str, str]]:
    yield {"role": "system", "content": _SYSTEM_PROMPT}
    for expression, result in _EXAMPLES.items():
        call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
        yield {"role": "user", "content": f"Calculate {expression}."}
        yield {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}
        yield {"role": "user", "content": _response(result)}
        yield {"role": "assistant", "content": f"The answer is {result}."}


def _response(result: str) -> str:
    return f"<tool_response>{result}</tool_response>"
