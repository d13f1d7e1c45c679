"""What every engine must do, on real vLLM and on transformers: two architectures, tied and untied embeddings.

The truth is a plain forward pass in fp32 of the version that made the token. One engine for each case serves all tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.protocol.wire.sample import Span
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated, KvCache, Load
from streamrl.workers.engines.vllm.engine import VllmEngine
from tests.integration.engine_world import (
    CASES,
    MAX_PROMPT,
    TOLERANCE,
    Served,
    assert_a_load_comes_in_mid_sample,
    prompts,
    proving,
    started,
    worst,
)
from tests.integration.episode_world import compare, play_all
from tests.tiny_models import CHARACTERS

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries; ours are watched by every other test
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES, ids=str)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with started(Served.of(request.param, tmp_path_factory.mktemp("models"))) as made:
        yield made


SETTINGS = {
    "plain": {},
    "warm, not too short": {"temperature": 0.7, "min_tokens": 12},
    "greedy": {"greedy": True},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
    "penalised": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_logprobs_are_those_of_the_version_just_loaded(served: Served, name: str) -> None:
    await served.load(0)
    await served.sample(prompts(2))
    version = await served.load(1)
    asked = prompts(12, seed=1)

    for prompt, got in zip(asked, await served.sample(asked, **SETTINGS[name]), strict=True):
        response = got.token_ids.tolist()
        sampling = schema.Sampling(max_tokens=32, **SETTINGS[name])
        logits = served.logits(1, prompt, response)
        assert worst(got, served.expected(logits, prompt, response, sampling)) <= TOLERANCE
        assert got.spans == (Span(version=version, step=served_step(version), start=0, end=len(response)),)
        assert len(response) >= sampling.min_tokens


def served_step(version: int) -> int:
    return 100 + version - make_version(1, 0)


async def test_old_weights_do_not_pass_for_new_ones(served: Served) -> None:
    """What the equality above is worth: the versions differ by far more than its tolerance."""
    await served.load(1)
    (prompt,) = prompts(1)
    (got,) = await served.sample([prompt])
    response = got.token_ids.tolist()
    stale = served.expected(served.logits(0, prompt, response), prompt, response, schema.Sampling())
    assert worst(got, stale) > 100 * TOLERANCE


async def test_samples_in_flight_go_on_under_the_new_version_with_their_keys_and_values(served: Served) -> None:
    first = await served.load(0)
    asked = prompts(6, seed=2)
    for _ in range(5):  # on a busy machine the engine may be done with all before it is this process's turn again
        long = asyncio.gather(
            *(served.engine.generate(served.request(p, max_tokens=180, min_tokens=180)) for p in asked)
        )
        await served.sample(prompts(1, seed=3), max_tokens=20, min_tokens=20)  # by then the others have come as far
        if served.engine.stats().in_flight == 6:
            break
        await long
    else:
        raise AssertionError("five times all were done when they should have been in the midst")
    second = await served.load(1)

    for prompt, got in zip(asked, await long, strict=True):
        assert [span.version for span in got.spans] == [first, second]
        assert [span.step for span in got.spans] == [served_step(first), served_step(second)]
        assert (got.spans[0].start, got.spans[-1].end) == (0, len(got.token_ids)) == (0, 180)
        switch = got.spans[1].start
        response = got.token_ids.tolist()
        logits = mixed_logits(served.models[0], served.models[1], prompt, response, switch)
        sampling = schema.Sampling(max_tokens=180, min_tokens=180)
        assert worst(got, served.expected(logits, prompt, response, sampling)) <= TOLERANCE


def mixed_logits(
    old: torch.nn.Module, new: torch.nn.Module, prompt: Sequence[int], response: Sequence[int], switch: int
) -> torch.Tensor:  # [T, V]
    """Old weights up to the token before `switch`; from there new weights, on the old ones' keys and values."""
    ids = torch.tensor([[*prompt, *response]])
    before = len(prompt) + switch - 1
    with torch.no_grad():
        cache = transformers.DynamicCache()
        start = old(ids[:, :before], past_key_values=cache, use_cache=True).logits[0]
        rest = new(ids[:, before:-1], past_key_values=cache, use_cache=True).logits[0]
    return torch.cat([start[len(prompt) - 1 :], rest])


@pytest.mark.parametrize("again", [False, True], ids=["newer", "the same, which was refused"])
async def test_nothing_cached_for_older_weights_is_read_by_later_samples(served: Served, again: bool) -> None:
    (base,) = np.random.default_rng(5).integers(3, 3 + len(CHARACTERS), size=(1, MAX_PROMPT)).tolist()
    await served.load(0)
    await served.sample([base] * 3, max_tokens=4)
    await served.load(2, again=again)

    for got in await served.sample([base] * 3, max_tokens=4):
        response = got.token_ids.tolist()
        expected = served.expected(served.logits(2, base, response), base, response, schema.Sampling(max_tokens=4))
        assert worst(got, expected) <= TOLERANCE


async def test_two_hundred_sequences_that_a_load_comes_across_agree_with_the_versions_that_made_them(
    served: Served, record_property: Any
) -> None:
    """And as many more as it takes: whenever the load comes, some are under way."""
    first = await served.load(0)
    asked, sampling = prompts(2000, seed=8), schema.Sampling(max_tokens=64, min_tokens=8)
    making = [start(served, prompt, sampling) for prompt in asked[:200]]
    await served.sample(prompts(1, seed=3), max_tokens=16, min_tokens=16)  # by then many have come as far
    loading = asyncio.create_task(served.load(1))
    while not loading.done() and len(making) < len(asked):
        if sum(not one.done() for one in making) < 50:
            making.append(start(served, asked[len(making)], sampling))
        await asyncio.sleep(0.01)
    second = await loading

    made = await asyncio.gather(*making)
    assert {span.version for got in made for span in got.spans} == {first, second}
    off: list[float] = []  # the worst token of each sequence
    for prompt, got in zip(asked, made, strict=False):
        response = got.token_ids.tolist()
        if len(got.spans) == 2:
            logits = mixed_logits(served.models[0], served.models[1], prompt, response, got.spans[1].start)
        else:
            logits = served.logits(0 if got.spans[0].version == first else 1, prompt, response)
        off.append(worst(got, served.expected(logits, prompt, response, sampling)))
    num_across, num_tokens = sum(len(got.spans) == 2 for got in made), sum(len(got.token_ids) for got in made)
    record_property(
        "figure",
        f"{len(off)} sequences, {num_across} across a load, {num_tokens} tokens: off by {max(off):.1e} at most",
    )
    assert len(off) >= 200
    assert max(off) <= TOLERANCE


def start(served: Served, prompt: Sequence[int], sampling: schema.Sampling) -> asyncio.Task[Generated]:
    asked = served.request(prompt, max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens)
    return asyncio.create_task(served.engine.generate(asked))


@pytest.mark.parametrize("kv_cache", ["clear", "salt"])
@pytest.mark.parametrize("count", [45, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_of_random_episodes_each_sampled_token_is_trained_once_with_its_own_logprob(
    served: Served, count: int, kv_cache: KvCache, record_property: Any
) -> None:
    """As the learner computes it, through packing and the policy: with tokens given between turns, branches, end
    tokens banned anew at the begin of each turn, and loads in the middle of it all."""
    episodes, models = await play_all(served, count, kv_cache=kv_cache)
    compared = compare(served, episodes, models, kv_cache=kv_cache)
    record_property("figure", str(compared))
    assert compared.num_across > 0
    assert compared.num_branches > count / 3
    num_off, num_tokens = len(compared.off), compared.num_tokens
    assert num_off == num_tokens if kv_cache == "clear" else num_off > num_tokens / 20
    assert max(compared.off) <= TOLERANCE


async def test_a_cleared_cache_makes_each_token_what_its_own_version_makes_of_it(served: Served) -> None:
    await assert_a_load_comes_in_mid_sample(served, count=6, length=180)


async def test_a_kept_cache_may_serve_older_keys_to_a_later_sample_and_its_logprobs_say_so(served: Served) -> None:
    (base,) = np.random.default_rng(6).integers(3, 3 + len(CHARACTERS), size=(1, MAX_PROMPT)).tolist()
    await served.load(0)
    await served.sample([base] * 3, max_tokens=4)
    await served.load(2, "keep")

    for got in await served.sample([base] * 3, max_tokens=4):
        response = got.token_ids.tolist()
        sampling = schema.Sampling(max_tokens=4)
        ways = [served.logits(2, base, response)]  # nothing was read, or so many tokens
        for cached in (16, 32, 64, 128, 192):
            mixed = mixed_logits(served.models[0], served.models[2], base[:cached], [*base[cached:], *response], 1)
            ways.append(mixed[-len(response) :])
        off = [worst(got, served.expected(logits, base, response, sampling)) for logits in ways]
        assert min(off) <= TOLERANCE
        if isinstance(served.engine, VllmEngine):
            assert off[0] > 100 * TOLERANCE


async def test_plain_logprobs_are_those_of_a_forward_pass_also_while_samples_are_in_flight(served: Served) -> None:
    await served.load(0)
    busy = asyncio.gather(*(served.engine.generate(served.request(p, max_tokens=64)) for p in prompts(4)))
    await served.load(2)
    ids = prompts(1, seed=7)[0]
    for _ in range(2):
        answered = await served.engine.logprobs(np.asarray(ids, dtype=np.int32))
        expected = served.logits(2, ids[:1], ids[1:]).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert np.abs(answered - expected.numpy()).max() <= TOLERANCE
    await busy


async def test_reloads_are_proved_while_samples_are_in_flight(served: Served) -> None:
    mirror = served.mirror(1)
    version = make_version(1, 1)
    manifest, prover, progress = proving(served, version)
    await prover.rehearse(served.engine, mirror)
    before = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert len(before.wrong) == before.num_read > 0
    assert not before.unreadable
    await served.load(0)
    busy = asyncio.gather(*(served.engine.generate(served.request(p, max_tokens=64)) for p in prompts(4)))
    await served.engine.load(Load(weights=mirror, version=version, step=1))
    await prover.check(served.engine, mirror, manifest)
    await busy
    assert progress.report().detail["engine_off"] < TOLERANCE


async def test_greedy_takes_the_likeliest_token_and_sampling_does_not_repeat_itself(served: Served) -> None:
    await served.load(0)
    (prompt,) = prompts(1)
    first, again = await served.sample([prompt] * 2, greedy=True)
    assert first.token_ids.tolist() == again.token_ids.tolist()
    likeliest = served.logits(0, prompt, first.token_ids.tolist()).argmax(dim=-1)[1:]
    assert likeliest.tolist() == first.token_ids.tolist()[1:]

    sampled = await served.sample([prompt] * 8, min_tokens=16, max_tokens=16)
    assert len({tuple(got.token_ids.tolist()) for got in sampled}) == 8


async def test_a_sample_ends_by_itself_or_at_its_limit(served: Served) -> None:
    await served.load(0)
    ends: dict[bool, int] = {True: 0, False: 0}
    for got in await served.sample([prompts(1)[0]] * 40, max_tokens=16):
        finished = got.finish_reason == "stop"
        ends[finished] += 1
        assert finished == (got.token_ids[-1] in served.facts.stop_ids)
        assert finished or len(got.token_ids) == 16
        assert "<eos>" not in got.text
    assert ends[True]
    assert ends[False]


async def test_a_stop_string_ends_a_sample_once_it_is_long_enough_and_is_not_in_its_text(served: Served) -> None:
    await served.load(0)
    stop = tuple("aeiou0123456789")
    for got in await served.sample([prompts(1)[0]] * 12, max_tokens=128, min_tokens=5, stop=stop):
        whole = served.facts.tokenizer.decode(got.token_ids.tolist(), skip_special_tokens=True)
        assert got.finish_reason == "stop"
        assert len(got.token_ids) > 5
        assert len(got.logprobs) == got.spans[-1].end == len(got.token_ids)
        if got.token_ids[-1] not in served.facts.stop_ids:
            assert whole[len(got.text) :] in stop
            assert whole[: len(got.text)] == got.text
            after_min = served.facts.tokenizer.decode(got.token_ids[5:-1].tolist(), skip_special_tokens=True)
            assert not any(string in after_min for string in stop)


async def test_a_sample_that_cannot_be_is_refused_and_the_engine_goes_on(served: Served) -> None:
    await served.load(0)
    too_long = [5] * (MAX_PROMPT + 201)
    with pytest.raises(SampleError):
        await served.engine.generate(served.request(too_long))
    assert len(await served.sample(prompts(2))) == 2


async def test_abandoned_samples_leave_the_engine(served: Served) -> None:
    await served.load(0)
    task = asyncio.create_task(served.engine.generate(served.request(prompts(1)[0], max_tokens=190, min_tokens=190)))
    await served.sample(prompts(1), max_tokens=4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.engine.stats().in_flight == 0
    await served.engine.check_alive()
    assert len(await served.sample(prompts(2))) == 2


async def test_tokens_are_counted_as_they_are_made(served: Served) -> None:
    await served.load(0)
    before = served.engine.stats().num_made
    made = await served.sample(prompts(3))
    assert served.engine.stats().num_made - before == sum(len(got.token_ids) for got in made)
