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
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.rewards.base import RewardDouble, Rewards, Weighted
from tests.helpers import make_group, make_ticket
from tests.tiny_models import CHARACTERS, make_tokenizer
from tests.worker_world import worker_config

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
        assert played.rewards == (0.5,) * len(engine.said)
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
        samples.append(sample._replace(turn_rewards=tuple(rng.random() for _ in sample.turns())))
    group = make_group(make_ticket(1), samples=tuple(samples))
    header, body = encode_group(group)
    back = decode_body(decode_header(header), body)
    for before, after in zip(samples, back.samples, strict=True):
        assert (before.mask_runs, before.spans) == (after.mask_runs, after.spans)
        assert before.turn_rewards == after.turn_rewards
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


async def test_rewards_of_turns_are_delivered_with_their_weight_and_add_up(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer(given="no", reward=len(said), done=len(said) == 3))
    config = worker_config().model_copy(update={"environment": schema.Environment(target="m:f", weight=0.5)})
    assert config.environment is not None
    answerer = Answerer(
        rewards=Rewards({"whole": Weighted(reward=RewardDouble(lambda item: 10.0), weight=0.1, max_abs=1e6)}),
        config=config,
        worker="w",
        fingerprint="model",
        player=Player(environment, tail=Tail(tokenizer), settings=config.environment),
    )

    group = await answerer.answer(make_ticket(1, num_samples=2), Recorded(0, tokenizer.eos_token_id))

    for sample in group.samples:
        assert sample.rewards == {"whole": 10.0, "environment": 6.0}
        assert sample.turn_rewards == (0.5, 1.0, 1.5)
        assert sample.reward == 0.1 * 10.0 + 3.0
        assert len(sample.turns()) == 3


async def test_a_turn_without_a_token_is_no_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    class Silent(EngineDouble):
        async def generate(self, request: SampleRequest) -> Generated:
            nothing = np.zeros(0, np.int32)
            return Generated(
                token_ids=nothing, logprobs=nothing.astype(np.float32), text="", finish_reason="stop", spans=()
            )

    player = Player(
        EnvironmentDouble(lambda *_: Answer()), tail=Tail(tokenizer), settings=schema.Environment(target="m:f")
    )
    request = SampleRequest(request_id="r", prompt_ids=np.array([5], np.int32), sampling=schema.Sampling(max_tokens=4))
    with pytest.raises(SampleError, match="no token"):
        await player.play(make_ticket(1), Silent(), request)
