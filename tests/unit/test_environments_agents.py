"""Agents in their child processes: what they ask is their rollout, and nothing of them outlives it."""

from __future__ import annotations

from pathlib import Path

from tests.session_world import CALL, agent_world

CODE = '''
import json
from openai import AsyncOpenAI, OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]


async def calculator(session, row):
    """As anybody writes it."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(4):
        answer = await client.chat.completions.create(model="gpt", messages=messages, tools=TOOLS, temperature=0.0)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == row["answer"])
        for call in message.tool_calls:
            wanted = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(wanted["a"] + wanted["b"])})
    return 0.0
'''


async def test_an_agent_of_the_openai_package_with_tools_is_a_rollout(tmp_path: Path) -> None:
    async with agent_world(tmp_path, CODE, "calculator") as world:
        played, engine = await world.play(lambda asked: CALL if len(asked) == 1 else "5", {"answer": "5"})
        (first, called), (second, answered) = engine.said
        assert second[: len(first) + len(called.token_ids)] == [*first, *called.token_ids.tolist()]
        tail = world.facts.tokenizer.decode(second[len(first) + len(called.token_ids) :])
        assert tail == "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert (played.reward, played.sample.finish_reason) == (1.0, "stop")
        sample = played.sample
        assert sample.token_ids[sample.loss_mask()].tolist() == [*called.token_ids, *answered.token_ids]
        assert world.num_open == 0
