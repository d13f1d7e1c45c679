"""A teacher behind an address: log-probs of the very token ids, and never made up; outages wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from streamrl.config.schema import Teacher as Settings
from streamrl.errors import ConfigError, RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.workers.rewards.teacher import ServedTeacher, build_teacher
from streamrl.workers.rewards.teaching import split_by_row
from tests.http_reward_world import until
from tests.tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()
CONTEXT, TOKENS = np.array([5, 6, 7], np.int32), np.array([8, 9, 1], np.int32)
Asked = Mapping[str, Any]


def given(ids: list[int]) -> list[Any]:
    """A number that tells each token from the others, its place too."""
    return [None, *({str(token): {"logprob": -token - at / 100}} for at, token in enumerate(ids[1:], start=1))]


def vllm(request: httpx.Request) -> httpx.Response:
    asked = json.loads(request.content)
    match request.url.path:
        case "/tokenize":
            ids = TOKENIZER(asked["prompt"], add_special_tokens=False)["input_ids"]
            return httpx.Response(200, json={"tokens": ids, "max_model_len": 512})
        case "/detokenize":
            return httpx.Response(200, json={"prompt": TOKENIZER.decode(asked["tokens"])})
    return httpx.Response(200, json={"choices": [{"prompt_logprobs": given(asked["prompt"])}]})


def connect(
    answer: Callable[[httpx.Request], httpx.Response] = vllm, *, longest: int = 100, **settings: Any
) -> ServedTeacher:
    named = {"urls": ("http://teacher:1",), "timeout_s": 5.0, **settings}
    return build_teacher(
        Settings(**named),
        Permissions(hosts=("teacher",)),
        TOKENIZER,
        model="./policy",
        longest=longest,
        transport=httpx.MockTransport(answer),
        first_pause_s=0.01,
    )


def completions(answer: Callable[[list[int]], httpx.Response]) -> Callable[[httpx.Request], httpx.Response]:
    """Another answer to what is asked about tokens; the tokenizer is the policy's."""

    def answered(request: httpx.Request) -> httpx.Response:
        is_about_tokens = request.url.path == "/v1/completions"
        return answer(json.loads(request.content)["prompt"]) if is_about_tokens else vllm(request)

    return answered


async def test_each_token_has_its_own_log_prob_behind_its_context() -> None:
    teacher = connect()

    told = await teacher.logprobs(CONTEXT, TOKENS)

    np.testing.assert_allclose(told, [-8.03, -9.04, -1.05], rtol=1e-6)
    assert len(await teacher.logprobs(CONTEXT, TOKENS[:0])) == 0
    np.testing.assert_allclose(await teacher.logprobs(CONTEXT[:0], TOKENS), [0, -9.01, -1.02], rtol=1e-6)
    await teacher.close()


@pytest.mark.parametrize(
    "told",
    [
        lambda ids: given(ids)[:-1],
        lambda ids: given([*ids[:-1], 33]),
        lambda ids: [*given(ids)[:-1], {str(ids[-1]): {"logprob": float("nan")}}],
        lambda ids: [*given(ids)[:-1], {str(ids[-1]): {"logprob": 0.5}}],
        lambda ids: [*given(ids)[:-1], {str(ids[-1]): {"logprob": -(10**400)}}],
        lambda ids: [*given(ids)[:-1], {str(ids[-1]): {"logprob": -1e39}}],
        lambda ids: [*given(ids)[:-1], None],
        lambda ids: None,
    ],
    ids=["too few", "of another token", "not a number", "no log-prob", "no float", "no float32", "none", "nothing"],
)
async def test_an_answer_that_lacks_a_log_prob_is_none_and_nothing_is_made_up(
    told: Callable[[list[int]], object],
) -> None:
    def answer(ids: list[int]) -> httpx.Response:
        return httpx.Response(200, content=json.dumps({"choices": [{"prompt_logprobs": told(ids)}]}))

    teacher = connect(completions(answer), attempts=2)

    with pytest.raises(RewardError, match=r"teacher: http://teacher:1: the answer .* \(2 attempts\)"):
        await teacher.logprobs(CONTEXT, TOKENS)
    await teacher.close()


async def test_while_the_teacher_is_out_samples_wait_and_then_have_their_log_probs() -> None:
    down = True

    def answer(request: httpx.Request) -> httpx.Response:
        if down:
            raise httpx.ConnectError("refused")
        return vllm(request)

    teacher = connect(answer)
    asked = [asyncio.create_task(teacher.logprobs(CONTEXT, TOKENS)) for _ in range(20)]
    await until(lambda: teacher.state != "well", "the outage shows")
    assert "ConnectError: refused" in teacher.state
    assert not any(one.done() for one in asked)
    down = False

    told = await asyncio.wait_for(asyncio.gather(*asked), 60)

    assert np.ptp(np.stack(told), axis=0).max() == 0
    assert teacher.outage() is None
    await teacher.close()


async def test_a_busy_teacher_is_not_asked_for_its_vocabulary_again() -> None:
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if paths.count("/v1/completions") == 1 and paths[-1] == "/v1/completions":
            return httpx.Response(429, headers={"retry-after": "0"}, text="too often")
        return vllm(request)

    teacher = connect(answer)
    await asyncio.wait_for(teacher.logprobs(CONTEXT, TOKENS), 60)
    await teacher.close()
    assert (paths.count("/v1/completions"), paths.count("/detokenize")) == (2, 1)


async def test_an_outage_that_does_not_end_gives_the_ticket_back() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, text="loading")

    teacher = connect(answer, outage_s=0.2)

    with pytest.raises(RewardOutage, match=r"no replica answered for 0.2 s: http://teacher:1: answered 503: loading"):
        await teacher.logprobs(CONTEXT, TOKENS)
    await teacher.close()


async def test_no_more_is_asked_at_a_time_than_is_allowed() -> None:
    at_once = most = 0
    held = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if most == 3:
            held.set()
        if request.url.path == "/v1/completions":
            await held.wait()
        at_once -= 1
        return vllm(request)

    teacher = connect(answer, max_concurrency=3)  # type: ignore[arg-type]
    await asyncio.wait_for(asyncio.gather(*(teacher.logprobs(CONTEXT, TOKENS) for _ in range(30))), 60)
    await teacher.close()
    assert most == 3


def another_vocabulary(request: httpx.Request) -> httpx.Response:
    asked = json.loads(request.content)
    if request.url.path == "/detokenize":
        return httpx.Response(200, json={"prompt": TOKENIZER.decode([*asked["tokens"][:-2], 3, 4])})
    return vllm(request)


def another_cut(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"tokens": [1, 2], "max_model_len": 512})


@pytest.mark.parametrize("answer", [another_vocabulary, another_cut])
async def test_a_server_with_another_tokenizer_is_an_error_that_names_both(
    answer: Callable[[httpx.Request], httpx.Response],
) -> None:
    teacher = connect(answer)

    with pytest.raises(
        ConfigError, match=r"http://teacher:1 serves has another tokenizer than model.path = './policy'"
    ):
        await teacher.logprobs(CONTEXT, TOKENS)
    await teacher.close()


async def test_a_server_with_too_little_room_is_told_before_any_sample_is_asked_about() -> None:
    teacher = connect(longest=512)

    with pytest.raises(ConfigError, match=r"serves at most 512 tokens.* = 513: start it with a larger"):
        await teacher.logprobs(CONTEXT, TOKENS)
    await teacher.close()


def test_a_host_that_this_worker_may_not_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teacher.urls: this worker may not send samples to 'elsewhere'"):
        connect(urls=("http://elsewhere:1",))


def test_a_rollout_is_asked_about_row_by_row() -> None:
    sample = Sample(
        token_ids=np.arange(20, 29, dtype=np.int32),
        logprobs=np.zeros(9, np.float32),
        mask_runs=(9,),
        spans=(Span(1, 0, 0, 4), Span(1, 0, 4, 7), Span(1, 0, 7, 9)),
        finish_reason="stop",
        rewards={},
        reward=0.0,
        branches=(Branch(start=4, row=0, keep=5), Branch(start=7, row=1, keep=6)),
    )

    rows = [(before.tolist(), own.tolist()) for before, own in split_by_row(CONTEXT, sample)]

    assert rows == [
        ([5, 6, 7], [20, 21, 22, 23]),
        ([5, 6, 7, 20, 21], [24, 25, 26]),
        ([5, 6, 7, 20, 21, 24], [27, 28]),
    ]


@pytest.mark.parametrize("url", ["http://teacher:1/v1", "http://teacher:1/v1/", "http://teacher:1/"])
async def test_the_base_url_of_openai_clients_is_an_address_too(url: str) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return vllm(request)

    teacher = connect(answer, urls=(url,))
    await teacher.logprobs(CONTEXT, TOKENS)
    await teacher.close()
    assert set(asked) == {"/tokenize", "/detokenize", "/v1/completions"}
