"""Rollouts of several turns: what was sampled is trained, each token once, and what was given never is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.learner.groups.plan import mask_before
from streamrl.protocol.wire.group import Span, decode_body, decode_header, encode_group
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from tests.helpers import make_group, make_ticket
from tests.tiny_models import CHARACTERS, make_tokenizer

CHATML = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


class Recorded(EngineDouble):
    """Says random tokens, up to as many as it may, by one or two versions, and remembers what it was asked and said."""

    def __init__(self, seed: int, end: int) -> None:
        super().__init__()
        self._rng, self._end = random.Random(seed), end
        self.said: list[tuple[list[int], Generated]] = []  # (the whole context, what came)

    async def generate(self, request: SampleRequest) -> Generated:
        rng, most = self._rng, request.sampling.max_tokens
        token_ids = [rng.randrange(3, 3 + len(CHARACTERS)) for _ in range(rng.randint(1, most))]
        if ended := rng.random() < 0.7:
            token_ids[-1] = self._end
        cut = rng.randint(0, len(token_ids) - 1)
        bounds = [(1, 0, cut), (2, cut, len(token_ids))] if cut else [(1, 0, len(token_ids))]
        generated = Generated(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array([-rng.random() - 0.01 for _ in token_ids], np.float32),
            text="said",
            finish_reason="stop" if ended else "length",
            spans=tuple(Span(version=make_version(1, v), step=v, start=a, end=b) for v, a, b in bounds),
        )
        self.said.append((request.prompt_ids.tolist(), generated))
        return generated


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
async def test_in_500_random_episodes_what_was_sampled_is_trained_once_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, is_chat: bool
) -> None:
    rng = random.Random(0)
    tokenizer.chat_template = CHATML
    end = tokenizer.eos_token_id
    samples = []
    for seed in range(500):
        num_turns = rng.randint(1, 5)

        def answer(row: Mapping[str, Any], said: list[str], last: int = num_turns) -> Answer:
            words = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 6)))
            return Answer(given=words, reward=0.5, done=len(said) == last)

        environment = EnvironmentDouble(answer, opening="" if is_chat else rng.choice(["", "abc"]))
        settings = schema.Environment(target="m:f", max_turns=rng.randint(1, 6), max_tokens=rng.randint(4, 60))
        ticket = make_ticket(seed, fields={"messages": []} if is_chat else {})
        engine = Recorded(seed, end)
        request = SampleRequest(
            request_id="r", prompt_ids=ticket.token_ids, sampling=schema.Sampling(max_tokens=rng.randint(1, 8))
        )
        played = await Player(environment, tail=Tail(tokenizer), settings=settings).play(ticket, engine, request)

        # Written apart from the player: the tokens that the engine said are those with a loss, in order, each with its
        # log-prob and its version; and each turn was asked for with the very tokens before it.
        sample = played.sample
        mask = sample.loss_mask()
        assert sample.token_ids[mask].tolist() == [t for _, said in engine.said for t in said.token_ids.tolist()]
        assert sample.logprobs[mask].tolist() == [p for _, said in engine.said for p in said.logprobs.tolist()]
        assert not sample.logprobs[~mask].any()
        assert len(sample.token_ids) <= settings.max_tokens
        assert len(engine.said) <= min(num_turns, settings.max_turns)
        assert played.reward == 0.5 * len(engine.said)
        made = np.zeros(len(mask), np.int64)
        whole = [*ticket.token_ids.tolist(), *sample.token_ids.tolist()]
        for context, said in engine.said:
            assert whole[: len(context)] == context
            for span in said.spans:
                at = len(context) - len(ticket.token_ids)
                made[at + span.start : at + span.end] = span.version
        told = np.zeros(len(mask), np.int64)
        for span in sample.spans:
            told[span.start : span.end] = span.version
        assert told.tolist() == made.tolist()
        assert (told > 0).tolist() == mask.tolist()
        assert environment.num_open == 0
        samples.append(sample)
    group = make_group(make_ticket(1), samples=tuple(samples))
    header, body = encode_group(group)
    back = decode_body(decode_header(header), body)
    for before, after in zip(samples, back.samples, strict=True):
        assert (before.mask_runs, before.spans) == (after.mask_runs, after.spans)
    younger, num_masked = mask_before(back, 2)
    assert num_masked == sum(s.end - s.start for sample in samples for s in sample.spans if s.step == 1)
    for before, after in zip(back.samples, younger.samples, strict=True):
        assert before.turns() == after.turns(), "what is too old to be trained was said all the same"


async def test_a_chat_goes_on_as_its_template_would_have_written_it(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML
    end = tokenizer.eos_token_id
    tail = Tail(tokenizer)
    whole = tail.of_text("<eos>[user]abc<eos>[assistant]")
    assert tail.of_chat("abc", last=end) == whole[1:]
    assert tail.of_chat("abc", last=5) == whole, "an answer that was cut off gets its end"


async def test_a_template_that_rewrites_earlier_answers_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(SampleError, match="writes earlier answers otherwise"):
        Tail(tokenizer).of_chat("abc", last=5)


async def test_who_is_not_done_must_say_something(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer())
    player = Player(environment, tail=Tail(tokenizer), settings=schema.Environment(target="m:f"))
    request = SampleRequest(request_id="r", prompt_ids=np.arange(3, dtype=np.int32), sampling=schema.Sampling())
    with pytest.raises(SampleError, match="says nothing"):
        await player.play(make_ticket(1), Recorded(1, 2), request)
    assert environment.num_open == 0
