"""What an agent may ask of its session: what is heard, what is ignored and told, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.session_world import chat_facts
from tests.tiny_models import begin_all_with, end_all_with
from tests.unit.test_environments_sessions import FACTS, HELLO, world


async def test_a_stream_brings_the_tokens_too_where_they_are_asked_for() -> None:
    async with world() as here, here.opened() as session:
        asked: list[tuple[str, dict[str, Any]]] = [("v1/chat/completions", {"messages": HELLO})]
        asked.append(("v1/completions", {"prompt": "2 + 3"}))
        for number, (path, body) in enumerate(asked):
            got = await here.post(session, path, {**body, "stream": True, "return_token_ids": True})
            chunks = [json.loads(line.removeprefix("data: ")) for line in got.text.split("\n\n")[:-2]]
            context, made = here.engine.said[number]
            assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [context]
            choices = [choice for one in chunks for choice in one["choices"]]
            assert [choice["token_ids"] for choice in choices if "token_ids" in choice] == [made.token_ids.tolist()]
        plain = await here.chat(session, stream=True)
        assert "token_ids" not in plain.text


async def test_a_prompt_may_come_in_a_list_of_one() -> None:
    async with world() as here, here.opened() as session:
        for prompt in ("2 + 3", ["2 + 3"], [[5, 6]], [5, 6]):
            assert (await here.post(session, "v1/completions", {"prompt": prompt})).status_code == 200
        read = [asked.prompt_ids.tolist() for asked in here.engine.requests]
        assert (read[0], read[2]) == (read[1], read[3])
        assert read[3] == [5, 6]
        for several in (["a", "b"], [[5], [6]]):
            got = await here.post(session, "v1/completions", {"prompt": several})
            assert (got.status_code, got.json()["error"]["param"]) == (400, "prompt")
            assert "one prompt at a time" in got.json()["error"]["message"]


async def test_stop_tokens_are_the_models_own() -> None:
    [end] = FACTS.stop_ids
    async with world() as here, here.opened() as session:
        for wanted, status in (([end], 200), ([end, 5], 200), ([], 200), ([5], 400)):
            assert (await here.chat(session, stop_token_ids=wanted)).status_code == status
            body = {"token_ids": [5, 6], "sampling_params": {"stop_token_ids": wanted, "logprobs": 1}}
            got = await here.post(session, "inference/v1/generate", body)
            assert got.status_code == status
        error = got.json()["error"]
        assert error["param"] == "stop_token_ids"
        assert "generation_config.json" in error["message"]


async def test_stop_strings_are_ones_that_a_text_of_the_model_may_contain() -> None:
    async with world() as here, here.opened() as session:
        for stop, status in (("<|im_end|>", 200), (["."], 200), (["<|im_start|>user"], 400)):
            got = await here.chat(session, stop=stop)
            assert got.status_code == status
        error = got.json()["error"]
        assert error["param"] == "stop"
        assert "'<|im_start|>' is a special token" in error["message"]
        assert "generation_config.json" in error["message"]


@pytest.mark.parametrize(
    "more",
    [{"sampling_params": {"logprobs": 5}}, {"sampling_params": {"allowed_token_ids": [5]}}, {"features": {"x": 1}}],
)
async def test_what_tokens_alone_cannot_say_is_refused(more: dict[str, Any]) -> None:
    async with world() as here, here.opened() as session:
        got = await here.post(session, "inference/v1/generate", {"token_ids": [5], **more})
        assert got.status_code == 400
        assert next(iter(more.get("sampling_params", more))) in got.json()["error"]["param"]


async def test_a_completions_prompt_gets_special_tokens_unless_the_agent_says_otherwise() -> None:
    facts = chat_facts("<s>", special=True)
    begin_all_with(facts.tokenizer, "<s>")
    async with world(facts=facts) as here, here.opened() as session:
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            got = await here.post(session, "v1/completions", {"prompt": "<s>2 + 3", **more})
            assert got.status_code == 200, got.text
        read = [facts.tokenizer.decode(asked.prompt_ids) for asked in here.engine.requests]
        assert read == ["<s><s>2 + 3", "<s><s>2 + 3", "<s>2 + 3"]


async def test_no_end_token_stands_behind_a_completions_prompt() -> None:
    facts = chat_facts()
    end_all_with(facts.tokenizer, "<|im_end|>")
    async with world(facts=facts) as here, here.opened() as session:
        assert (await here.post(session, "v1/completions", {"prompt": "2 + 3"})).status_code == 200
        assert facts.tokenizer.decode(here.engine.requests[0].prompt_ids) == "2 + 3"


async def test_what_is_said_of_the_template_and_is_so_anyway_is_accepted() -> None:
    async with world() as here, here.opened() as session:
        usual = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
        assert (await here.chat(session, **usual)).status_code == 200


async def test_what_an_agent_says_of_sampling_is_ignored_and_told_and_max_tokens_and_stop_are_heard() -> None:
    async with world() as here, here.opened() as session:
        got = await here.chat(session, temperature=0, top_p=0.5, seed=1, max_completion_tokens=3, stop=["."], user="me")
        assert got.headers["x-streamrl-ignored"] == "temperature, top_p, seed"
        sampling = here.engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 3)
        assert sampling.stop == ("END", ".")
        assert got.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tools": [{"type": "function", "name": "add", "parameters": {}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "add", "parameters": []}}]}, "tools.0"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages"),
    ],
)
async def test_what_would_be_another_answer_than_the_agent_reads_is_refused(asked: dict[str, Any], param: str) -> None:
    async with world() as here, here.opened() as session:
        got = await here.post(session, "v1/chat/completions", {"model": "m", "messages": HELLO, **asked})
        error = got.json()["error"]
        assert (got.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert not here.engine.requests


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages": 7}'])
async def test_garbage_is_refused(body: bytes) -> None:
    async with world() as here, here.opened() as session:
        for path in ("v1/chat/completions", "v1/completions", "inference/v1/generate"):
            got = await here.post(session, path, body)
            assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error")
