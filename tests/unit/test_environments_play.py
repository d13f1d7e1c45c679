"""Rollouts of several turns: what was sampled is trained, each token once, and what was given never is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from streamrl.config import schema
from streamrl.data.settings import DATE
from streamrl.errors import SampleError
from streamrl.learner.groups.fetch import mask_before
from streamrl.protocol.wire.branches import rows_of
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Span
from streamrl.protocol.wire.ticket import Purpose
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.rewards.base import RewardDouble
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.answer import Answerer
from tests.brute_force import check_by_brute_force
from tests.helpers import make_group, make_ticket
from tests.session_world import ADD, chat_tokenizer
from tests.tiny_models import CHARACTERS, make_tokenizer, sentencepiece_like
from tests.worker_world import worker_config

CHATML = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


class Recorded(EngineDouble):
    """Says random tokens, up to as many as it may, by one or two versions, and remembers what it was asked and said."""

    def __init__(self, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self._rng, self._tokenizer = random.Random(seed), tokenizer
        self.said: list[tuple[list[int], Generated]] = []  # (the whole context, what came)

    async def generate(self, request: SampleRequest) -> Generated:
        rng, most = self._rng, request.sampling.max_tokens
        token_ids = [rng.randrange(3, 3 + len(CHARACTERS)) for _ in range(rng.randint(1, most))]
        if ended := rng.random() < 0.7:
            token_ids[-1] = self._tokenizer.eos_token_id
        cut = rng.randint(0, len(token_ids) - 1)
        bounds = [(1, 0, cut), (2, cut, len(token_ids))] if cut else [(1, 0, len(token_ids))]
        generated = Generated(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array([-rng.random() - 0.01 for _ in token_ids], np.float32),
            text=str(self._tokenizer.decode(token_ids, skip_special_tokens=True)),
            finish_reason="stop" if ended else "length",
            spans=tuple(Span(version=make_version(1, v), step=v, start=a, end=b) for v, a, b in bounds),
        )
        self.said.append((request.prompt_ids.tolist(), generated))
        return generated


class Spoken(EngineDouble):
    """Says these answers, one after the other, each with its end."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> None:
        super().__init__()
        self._tokenizer, self._answers = tokenizer, list(answers)
        self.asked: list[list[int]] = []

    async def generate(self, request: SampleRequest) -> Generated:
        self.asked.append(request.prompt_ids.tolist())
        text = self._answers.pop(0)
        token_ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        return Generated(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.full(len(token_ids), -0.5, np.float32),
            text=text,
            finish_reason="stop",
            spans=(Span(version=make_version(1, 0), step=0, start=0, end=len(token_ids)),),
        )


DROPS = CHATML.replace("message['content']", "message['content'].split('=')[-1]")


@pytest.mark.parametrize("template", ["", CHATML, DROPS], ids=["text", "chat", "a chat that drops what was thought"])
async def test_in_500_random_episodes_what_was_sampled_is_trained_once_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    rng, is_chat = random.Random(0), bool(template)
    tokenizer.chat_template = template
    samples = []
    for seed in range(500):
        num_turns = rng.randint(1, 5)

        def answer(row: Mapping[str, Any], said: list[str], last: int = num_turns) -> Answer:
            words = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 6)))
            return Answer(observation=words, reward=0.5, done=len(said) == last)

        environment = EnvironmentDouble(answer, opening="" if is_chat else rng.choice(["", "abc"]))
        settings = schema.Environment(target="m:f", max_turns=rng.randint(1, 6), max_tokens=rng.randint(4, 60))
        ticket = make_ticket(seed, fields={"messages": [{"role": "user", "content": "abc"}]} if is_chat else {})
        engine = Recorded(seed, tokenizer)
        request = SampleRequest(
            request_id="r", prompt_ids=ticket.token_ids, sampling=schema.Sampling(max_tokens=rng.randint(1, 8))
        )
        player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=settings)
        played = await player.play(ticket, engine, request)

        sample = played.sample
        check_by_brute_force(ticket.token_ids.tolist(), sample, engine.said)
        assert len(sample.token_ids) <= settings.max_tokens
        assert len(engine.said) <= min(num_turns, settings.max_turns)
        assert played.turn_rewards == (0.5,) * len(engine.said)
        assert environment.num_open == 0
        samples.append(sample._replace(turn_rewards=tuple(rng.random() for _ in sample.turns())))
    assert any(sample.branches for sample in samples) == (template == DROPS)
    group = make_group(make_ticket(1), samples=tuple(samples))
    header, body = encode_group(group)
    back = decode_body(decode_header(header), body)
    for before, after in zip(samples, back.samples, strict=True):
        assert (before.mask_runs, before.spans, before.branches) == (after.mask_runs, after.spans, after.branches)
        assert before.turn_rewards == after.turn_rewards
    younger, num_masked = mask_before(back, 2)
    assert num_masked == sum(s.end - s.start for sample in samples for s in sample.spans if s.step == 1)
    for before, after in zip(back.samples, younger.samples, strict=True):
        assert before.turns() == after.turns(), "what is too old to be trained was said all the same"


async def test_a_chat_goes_on_as_its_template_would_have_written_it(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML
    end = tokenizer.eos_token_id
    tail = Tail(tokenizer, date=DATE)
    whole = tail.of_text("<eos>user:abc<eos>assistant:")
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b c "},
        {"role": "user", "content": "abc"},
    ]
    ended, cut_off = np.array([7, 8, end], np.int32), np.array([7, 8, 5], np.int32)
    for template in (CHATML, CHATML.replace("message['content']", "message['content'] | trim")):
        tokenizer.chat_template = template
        for so_far, behind in ((ended, whole[1:]), (cut_off, whole)):  # an answer that was cut off gets its end
            kept, token_ids = tail.of_chat(said, so_far)
            assert (kept.tolist(), token_ids) == (so_far.tolist(), behind)


async def test_a_template_that_drops_what_was_thought_starts_a_branch(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = DROPS
    environment = EnvironmentDouble(lambda row, said: Answer(observation="no", done=len(said) == 3))
    engine = Spoken(tokenizer, ["1+1=2", "3", "4"])
    request = SampleRequest(
        request_id="r",
        prompt_ids=np.asarray(Tail(tokenizer, date=DATE).of_text("user:abc<eos>assistant:"), np.int32),
        sampling=schema.Sampling(),
    )
    ticket = make_ticket(1, fields={"messages": [{"role": "user", "content": "abc"}]})
    settings = schema.Environment(target="m:f")
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=settings)
    sample = (await player.play(ticket, engine, request)).sample

    asked = [tokenizer.decode(context) for context in engine.asked]
    assert asked[1] == "user:abc<eos>assistant:2<eos>user:no<eos>assistant:"
    assert asked[2] == asked[1] + "3<eos>user:no<eos>assistant:", "an answer that stays as it was is gone on from"
    rows = rows_of(len(request.prompt_ids), len(sample.token_ids), sample.branches)
    whole = np.concatenate([request.prompt_ids, sample.token_ids])
    assert [tokenizer.decode(whole[row]) for row in rows] == [asked[0] + "1+1=2<eos>", asked[2] + "4<eos>"]
    assert tokenizer.decode(sample.token_ids[sample.loss_mask()]) == "1+1=2<eos>3<eos>4<eos>"
    assert sample.branches[0].keep == len(request.prompt_ids)


async def test_what_an_environment_says_has_no_space_that_a_tokenizer_puts_before_every_text() -> None:
    """As those of sentencepiece do, Llama 2's and Mistral's: within a text there is none."""
    spaced = sentencepiece_like()
    environment = EnvironmentDouble(lambda row, said: Answer(observation="\n3+3=", done=len(said) == 2), opening="2+2=")
    engine = Spoken(spaced, ["4", "6"])
    prompt_ids = np.asarray(spaced("0\n")["input_ids"], np.int32)
    request = SampleRequest(request_id="r", prompt_ids=prompt_ids, sampling=schema.Sampling())
    player = Player(environment, tail=Tail(spaced, date=DATE), settings=schema.Environment(target="m:f"))

    await player.play(make_ticket(1), engine, request)

    asked = ["".join(spaced.convert_ids_to_tokens(ids)) for ids in engine.asked]
    assert asked == ["▁0\n2+2=", "▁0\n2+2=▁4<eos>\n3+3="]


async def test_a_conversation_that_is_written_anew_has_its_date_and_its_tools() -> None:
    chatting = chat_tokenizer()
    written = "{{ (tools or ['none'])[0].function.name }} {{ strftime_now('%Y') }};"
    chatting.chat_template = written + DROPS.replace("<eos>", "<|im_end|>")
    environment = EnvironmentDouble(lambda row, said: Answer(observation="no", done=len(said) == 2))
    engine = Spoken(chatting, ["1+1=2", "3"])
    request = SampleRequest(request_id="r", prompt_ids=np.arange(4, 7, dtype=np.int32), sampling=schema.Sampling())
    ticket = make_ticket(1, fields={"messages": [{"role": "user", "content": "abc"}], "tools": [ADD]})
    player = Player(environment, tail=Tail(chatting, date=DATE), settings=schema.Environment(target="m:f"))

    await player.play(ticket, engine, request)

    whole = "add 2026;user:abc<|im_end|>assistant:2<|im_end|>user:no<|im_end|>assistant:"
    assert chatting.decode(engine.asked[1]) == whole


async def test_who_is_not_done_must_say_something(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer())
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=schema.Environment(target="m:f"))
    request = SampleRequest(request_id="r", prompt_ids=np.arange(3, dtype=np.int32), sampling=schema.Sampling())
    with pytest.raises(SampleError, match="returned no observation"):
        await player.play(make_ticket(1), Recorded(1, tokenizer), request)
    assert environment.num_open == 0


async def test_an_opening_that_leaves_no_room_is_an_error_and_no_reward(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer(done=True), opening="x" * 20)
    settings = schema.Environment(target="m:f", max_tokens=20)
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=settings)
    request = SampleRequest(request_id="r", prompt_ids=np.arange(3, dtype=np.int32), sampling=schema.Sampling())
    with pytest.raises(SampleError, match=r"the opening has 20 tokens: environment\.max_tokens = 20 leaves no room"):
        await player.play(make_ticket(1), Recorded(1, tokenizer), request)


async def test_behind_the_last_turn_that_there_may_be_nothing_need_be_said(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer(reward=0.5))
    settings = schema.Environment(target="m:f", max_turns=1)
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=settings)
    request = SampleRequest(request_id="r", prompt_ids=np.arange(3, dtype=np.int32), sampling=schema.Sampling())
    played = await player.play(make_ticket(1), Recorded(1, tokenizer), request)
    assert (played.reward, played.sample.finish_reason) == (0.5, "length")


async def test_rewards_of_turns_are_delivered_with_their_weight_and_add_up(tokenizer: PreTrainedTokenizerFast) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer(observation="no", reward=len(said), done=len(said) == 3))
    config = worker_config().model_copy(update={"environment": schema.Environment(target="m:f", weight=0.5)})
    assert config.environment is not None
    answerer = Answerer(
        rewards=Rewards({"whole": Weighted(reward=RewardDouble(lambda item: 10.0), weight=0.1, max_abs=1e6)}),
        config=config,
        worker="w",
        fingerprint="model",
        player=Player(environment, tail=Tail(tokenizer, date=DATE), settings=config.environment),
    )

    group = await answerer.answer(make_ticket(1, num_samples=2), Recorded(0, tokenizer))

    for sample in group.samples:
        assert sample.rewards == {"whole": 10.0, "environment": 6.0}
        assert sample.turn_rewards == (0.5, 1.0, 1.5)
        assert sample.reward == 0.1 * 10.0 + 3.0
        assert len(sample.turns()) == 3


async def test_where_no_source_applies_the_environment_s_reward_is_the_sample_s(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    environment = EnvironmentDouble(lambda row, said: Answer(reward=0.5, done=True))
    config = worker_config().model_copy(update={"environment": schema.Environment(target="m:f")})
    assert config.environment is not None
    answerer = Answerer(
        rewards=Rewards({"whole": Weighted(reward=RewardDouble(lambda item: None), weight=0.1)}),
        config=config,
        worker="w",
        fingerprint="model",
        player=Player(environment, tail=Tail(tokenizer, date=DATE), settings=config.environment),
    )

    group = await answerer.answer(make_ticket(1, num_samples=2), Recorded(0, tokenizer))

    assert not group.header.error
    assert [(sample.rewards, sample.reward) for sample in group.samples] == [({"environment": 0.5}, 0.5)] * 2
    assert answerer.rewards.trouble() == ""


@pytest.mark.parametrize(("purpose", "fails"), [("train", False), ("eval", True)])
async def test_where_no_source_applies_a_teacher_teaches_all_the_same_and_nobody_is_asked_when_it_is_evaluated(
    tokenizer: PreTrainedTokenizerFast, purpose: Purpose, fails: bool
) -> None:
    config = worker_config().model_copy(update={"teacher": schema.Teacher(path="on the learner's ranks")})
    rewards = Rewards({"whole": Weighted(reward=RewardDouble(lambda item: None), weight=0.1)})
    answerer = Answerer(rewards=rewards, config=config, worker="w", fingerprint="model")

    group = await answerer.answer(make_ticket(1, num_samples=2, purpose=purpose), Recorded(0, tokenizer))

    assert ("no reward applies" in group.header.error) == fails
    assert [sample.reward for sample in group.samples] == ([] if fails else [0.0, 0.0])
    assert ("no reward applies" in answerer.rewards.trouble()) == fails


@pytest.mark.parametrize("weight", [1.0, 10.0])
async def test_rewards_beyond_all_numbers_fail_their_sample_and_no_worker(
    tokenizer: PreTrainedTokenizerFast, weight: float
) -> None:
    earned = iter([1e308, 1e308, 1e308, -1e308, 1.0, 1.0])
    environment = EnvironmentDouble(
        lambda row, said: Answer(observation="no", reward=next(earned), done=len(said) == 2)
    )
    config = worker_config().model_copy(
        update={"environment": schema.Environment(target="m:f", weight=weight), "rewards": {}}
    )
    assert config.environment is not None
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=config.environment)
    answerer = Answerer(rewards=Rewards({}), config=config, worker="w", fingerprint="model", player=player)
    groups = [await answerer.answer(make_ticket(n, num_samples=1), Recorded(0, tokenizer)) for n in range(3)]
    for group in groups:
        encode_group(group)
    assert "rewards are not finite: they add up to inf" in groups[0].header.error
    assert groups[1].header.failed == (weight > 1.0), "a turn's own may be too much where the sum is not"
    assert not groups[2].header.failed


async def test_a_turn_without_a_token_is_no_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    class Silent(EngineDouble):
        async def generate(self, request: SampleRequest) -> Generated:
            nothing = np.zeros(0, np.int32)
            return Generated(
                token_ids=nothing, logprobs=nothing.astype(np.float32), text="", finish_reason="stop", spans=()
            )

    environment, tail = EnvironmentDouble(lambda *_: Answer()), Tail(tokenizer, date=DATE)
    player = Player(environment, tail=tail, settings=schema.Environment(target="m:f"))
    request = SampleRequest(request_id="r", prompt_ids=np.array([5], np.int32), sampling=schema.Sampling(max_tokens=4))
    with pytest.raises(SampleError, match="no token"):
        await player.play(make_ticket(1), Silent(), request)
