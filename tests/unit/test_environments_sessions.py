"""Sessions over HTTP: in OpenAI's form, each with a key of its own, bounded, and gone with its rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from streamrl.config import schema
from streamrl.data.settings import DATE
from streamrl.errors import EngineError
from streamrl.versions import make_version
from streamrl.workers.engines.base import SampleRequest
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.sessions import session as session_module
from streamrl.workers.sessions.session import Model, Session
from streamrl.workers.sessions.sessions import MAX_BODY_BYTES, Sessions
from streamrl.workers.sessions.tool_calls import make_parser
from tests.helpers import wait_until_async
from tests.session_world import ADD, CALL, Say, Teller, chat_facts

HELLO = [{"role": "user", "content": "hello"}]
FACTS = chat_facts()


class World:
    def __init__(self, sessions: Sessions, engine: Teller) -> None:
        self.sessions, self.engine = sessions, engine
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(sessions.asgi()), base_url="http://worker")

    def opened(self, **sampling: Any) -> contextlib.AbstractAsyncContextManager[Session]:
        request = SampleRequest(
            request_id="train-1-1",
            prompt_ids=np.array(FACTS.tokenizer("2 + 3")["input_ids"], np.int32),
            sampling=schema.Sampling(**{"max_tokens": 100, "stop": ("END",), **sampling}),
        )
        return self.sessions.opened(self.engine, request)

    async def post(
        self, session: Session, path: str, body: Any = None, *, key: str | bytes | None = None
    ) -> httpx.Response:
        given = session.key if key is None else key
        headers = {b"authorization": b"Bearer " + (given.encode() if isinstance(given, str) else given)}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(f"/sessions/{session.id}/{path}", content=content, headers=headers)

    async def chat(self, session: Session, messages: Any = HELLO, **more: Any) -> httpx.Response:
        return await self.post(session, "v1/chat/completions", {"model": "any", "messages": messages, **more})


@contextlib.asynccontextmanager
async def world(
    say: Say | str = "well", *, hold: bool = False, facts: ModelFacts = FACTS, **settings: Any
) -> AsyncIterator[World]:
    environment = schema.Environment(target="m:f", **{"max_tokens": 1000, **settings})
    with ThreadPoolExecutor(1) as thread:
        model = Model(
            facts=facts,
            parse=make_parser("hermes", facts.tokenizer),
            settings=environment,
            date=DATE,
            max_length=2000,
            thread=thread,
        )
        engine = Teller(facts, say if callable(say) else lambda asked: say, hold=hold)
        engine.loads.append((Path("weights"), make_version(1, 1), 1))
        made = World(Sessions(model), engine)
        async with made.http:
            yield made


async def test_an_answer_has_openais_form() -> None:
    async with world() as here, here.opened() as session:
        answer = (await here.chat(session, logprobs=True, return_token_ids=True)).json()
        [choice] = answer["choices"]
        assert (answer["object"], answer["model"]) == ("chat.completion", "tiny-chat")
        assert choice["message"] == {"role": "assistant", "content": "well", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["w", "e", "l", "l", ""]
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 5
        assert answer["prompt_token_ids"] == here.engine.said[0][0]


async def test_log_probs_name_tokens_by_their_ids_where_that_is_asked_for() -> None:
    async with world() as here, here.opened() as session:
        answer = (await here.chat(session, logprobs=True, return_tokens_as_token_ids=True)).json()
        ids = here.engine.said[0][1].token_ids.tolist()
        assert [one["token"] for one in answer["choices"][0]["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]


async def test_a_call_of_a_tool_is_parsed_where_there_are_tools() -> None:
    async with world(f"I add. {CALL}") as here, here.opened() as session:
        choice = (await here.chat(session, tools=[ADD])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I add. "
        [call] = choice["message"]["tool_calls"]
        assert (call["type"], call["id"], call["function"]["name"]) == ("function", "c00001000", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        for plain in ({}, {"tools": [ADD], "tool_choice": "none"}):
            choice = (await here.chat(session, **plain)).json()["choices"][0]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", f"I add. {CALL}")


@pytest.mark.parametrize("special", [True, False])
async def test_a_call_is_parsed_where_its_tags_are_tokens_of_their_own(special: bool) -> None:
    facts = chat_facts("<tool_call>", "</tool_call>", "<|pause|>", special=special)
    said = f"I<|pause|> add.{CALL}"
    async with world(lambda asked: said if len(asked) == 1 else "5", facts=facts) as here, here.opened() as session:
        first = (await here.chat(session, tools=[ADD])).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in first["tool_calls"]] == ["add"]
        assert first["content"] == ("I add." if special else "I<|pause|> add.")
        told = {"role": "tool", "tool_call_id": "x", "content": "5"}
        second = (await here.chat(session, [*HELLO, first, told], tools=[ADD])).json()["choices"][0]["message"]
        assert second["content"] == "5"
        (asked, called), (asked_again, _) = here.engine.said
        assert asked_again[: len(asked) + len(called.token_ids)] == [*asked, *called.token_ids.tolist()]
        assert session.num_tool_calls == 1


async def test_a_key_may_come_as_x_api_key() -> None:
    async with world() as here, here.opened() as session, here.opened() as other:
        place = f"/sessions/{session.id}/v1/chat/completions"
        asked = {"model": "any", "messages": HELLO}
        for key, status in ((session.key, 200), (other.key, 401)):
            headers = {"authorization": "Bearer EMPTY", "x-api-key": key}
            assert (await here.http.post(place, json=asked, headers=headers)).status_code == status


@pytest.mark.parametrize("call", ["<tool_call>{nothing}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>"])
async def test_what_only_looks_like_a_call_is_words(call: str) -> None:
    async with world(call) as here, here.opened() as session:
        choice = (await here.chat(session, tools=[ADD])).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", call)


async def test_a_stream_brings_the_same_in_chunks_and_then_the_usage() -> None:
    async with world(CALL) as here, here.opened() as session:
        got = await here.chat(session, tools=[ADD], stream=True, stream_options={"include_usage": True})
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        *chunks, usage = map(json.loads, lines)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["add"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(here.engine.said[0][1].token_ids))


async def test_tokens_go_in_and_come_out() -> None:
    async with world() as here, here.opened() as session:
        first = (await here.post(session, "v1/completions", {"prompt": "2 + 3"})).json()
        assert first["choices"][0]["text"] == "well"
        context, made = here.engine.said[0]
        ids = [*context, *made.token_ids.tolist(), 9, 10]
        body = {"model": "m", "token_ids": ids, "sampling_params": {"max_tokens": 3, "temperature": 0.5}}
        second = await here.post(session, "inference/v1/generate", body)
        [choice] = second.json()["choices"]
        assert choice["token_ids"] == here.engine.said[1][1].token_ids.tolist()
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        named = [one["token"] for one in choice["logprobs"]["content"]]
        assert named == [f"token_id:{i}" for i in choice["token_ids"]], "what the client of verifiers insists on"
        assert second.headers["x-streamrl-ignored"] == "temperature"
        assert session.trace.num_branches == 0
        assert session.trace.num_tokens == len(ids) + 3 - 5
        beyond = await here.post(session, "inference/v1/generate", {"token_ids": [1 << 20]})
        assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "invalid_value")


async def test_the_model_is_listed_with_its_length() -> None:
    async with world() as here, here.opened() as session:
        got = await here.http.get(
            f"/sessions/{session.id}/v1/models", headers={"authorization": f"Bearer {session.key}"}
        )
        [model] = got.json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny-chat", 2000)


async def test_what_was_sampled_is_never_tokenised_again_and_a_cut_history_starts_a_branch() -> None:
    async with world(lambda asked: CALL if len(asked) == 1 else "5") as here, here.opened() as session:
        first = (await here.chat(session, tools=[ADD])).json()["choices"][0]["message"]
        told = {"role": "tool", "tool_call_id": "x", "content": "5"}
        second = (await here.chat(session, [*HELLO, first, told], tools=[ADD])).json()["choices"][0]["message"]
        more = {"role": "user", "content": "and?"}
        await here.chat(session, [*HELLO, first, told, second, more], tools=[ADD])
        (a, said_a), (b, said_b), (c, _) = here.engine.said
        assert b[: len(a) + len(said_a.token_ids)] == [*a, *said_a.token_ids.tolist()]
        assert c[: len(b) + len(said_b.token_ids)] == [*b, *said_b.token_ids.tolist()]
        assert FACTS.tokenizer.decode(c[len(b) + len(said_b.token_ids) :]) == (
            "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        )
        rows = session.trace.num_branches
        await here.chat(session, [second, more], tools=[ADD])
        assert session.trace.num_branches == rows + 1
        written = here.engine.said[3][0]
        assert FACTS.tokenizer.decode(written).endswith(
            "5<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_another_rollouts_key_opens_nothing_and_a_closed_session_is_gone() -> None:
    async with world() as here:
        async with here.opened() as one, here.opened() as other:
            for key in (other.key, "", one.key[:-1], b"\xe4"):
                got = await here.post(one, "v1/chat/completions", b"{}", key=key)
                assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
            got = await here.http.post(f"/sessions/{one.id}/key/{one.key}/v1/chat/completions", content=b"{}")
            assert got.status_code == 401, "a key in a URL opens only where that is asked for"
            assert (await here.chat(one)).status_code == 200
        got = await here.chat(one)
        assert (got.status_code, got.json()["error"]["code"]) == (404, "session_over")
        assert here.sessions.num_open == 0


async def test_a_key_in_the_url_opens_where_it_may_and_is_redacted_in_what_is_said() -> None:
    async with world(key_in_url=True) as here, here.opened() as session:
        url = here.sessions.url_of(session)
        assert session.key in url
        path = url[url.index("/sessions") :]
        said = [{"role": "user", "content": f"cannot reach {url}"}]
        got = await here.http.post(f"{path}/chat/completions", json={"messages": said})
        assert got.status_code == 200
        context, _ = here.engine.said[0]
        assert "[key]" in FACTS.tokenizer.decode(context)
        assert session.key not in FACTS.tokenizer.decode(context)
        assert session.key not in session.trace.played("stop", 0.0).text
        for refused in (await here.http.post(f"{path}/nothing"), await here.http.post(f"{path}x/chat/completions")):
            assert session.key not in refused.text


async def test_a_rollout_is_bounded_in_turns_tokens_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(max_turns=2) as here, here.opened() as session:
        answers = [(await here.chat(session)).status_code for _ in range(3)]
        assert (answers, "max_turns" in session.spent) == ([200, 200, 400], True)
    async with world(max_tokens=60, max_turns=100) as here, here.opened() as session:
        while (got := await here.chat(session)).status_code == 200:
            assert session.trace.num_tokens <= 60
        assert (got.json()["error"]["code"], "max_tokens" in session.spent) == ("rollout_spent", True)
    async with world() as here, here.opened() as session:
        long = [{"role": "user", "content": "x" * 900}, {"role": "user", "content": "x" * 1200}]
        got = await here.chat(session, long)
        assert got.json()["error"]["code"] == "rollout_spent", "of tokens that were given, too"
        assert (await here.post(session, "v1/completions", b"x" * (MAX_BODY_BYTES + 1))).status_code == 413
    monkeypatch.setattr(session_module, "MAX_SESSION_BYTES", 100)
    async with world() as here, here.opened() as session:
        got = await here.chat(session)
        assert (await here.chat(session)).json()["error"]["code"] == "rollout_spent"


async def test_turns_that_are_asked_side_by_side_keep_the_bound_on_tokens_together() -> None:
    async with world(max_tokens=300, max_turns=100, hold=True) as here, here.opened(max_tokens=20) as session:
        several = [[{"role": "user", "content": f"helper {number}"}] for number in range(12)]
        asking = [asyncio.create_task(here.chat(session, messages)) for messages in several]

        async def asked() -> bool:
            return len(here.engine.requests) > 1

        await wait_until_async(asked, description="some are under way together")
        here.engine.release()
        answers = await asyncio.gather(*asking)
        assert session.trace.num_tokens <= 300
        done = [one for one in answers if one.status_code == 200]
        assert len(done) == session.trace.num_turns > 2, "what fits is answered, those that waited too"
        assert {one.json()["choices"][0]["message"]["content"] for one in done} == {"well"}, (
            "and not cut short for others"
        )
        assert {one.json()["error"]["code"] for one in answers if one not in done} == {"rollout_spent"}
        assert len({one.json()["id"] for one in done}) == len(done), "each has an id of its own"


async def test_who_waits_for_tokens_when_the_rollout_ends_is_told() -> None:
    async with world(max_tokens=100, hold=True) as here:
        async with here.opened() as session:
            asking = [asyncio.create_task(here.chat(session)) for _ in range(3)]

            async def asked() -> bool:
                return bool(here.engine.requests)

            await wait_until_async(asked, description="a turn is under way")
        answers = await asyncio.gather(*asking)
        assert {one.json()["error"]["code"] for one in answers} == {"session_over"}
        assert len(here.engine.requests) == 1, "the others waited"


async def test_an_engine_that_dies_ends_the_rollout_and_not_only_the_request() -> None:
    async with world() as here, here.opened() as session:
        here.engine.die()
        assert (await here.chat(session)).status_code == 503
        with pytest.raises(EngineError):
            session.failure.result()


async def test_what_is_under_way_when_the_rollout_ends_is_given_up_and_told() -> None:
    async with world(hold=True) as here:
        async with here.opened() as session:
            asking = asyncio.create_task(here.chat(session))

            async def asked() -> bool:
                return bool(here.engine.requests)

            await wait_until_async(asked, description="a turn is under way")
            assert session.quiet_s == 0.0
        assert (await asking).json()["error"]["code"] == "session_over"
        assert here.engine.stats().in_flight == 0
        assert session.trace.num_turns == 0


async def test_a_template_without_tools_is_told_of() -> None:
    facts = chat_facts()
    facts.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    async with world() as here, here.opened() as session:
        session.model = Model(**{**_fields(session.model), "facts": facts})
        session._conversation._tokenizer = facts.tokenizer
        got = await here.chat(session, tools=[ADD])
        assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")


def _fields(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("facts", "parse", "settings", "date", "max_length", "thread")}
