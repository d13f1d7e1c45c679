"""Random rollouts of several turns on a real engine, of all kinds that there are, and what the learner makes of them.

lines      an environment behind a prompt that is text
drops      a chat whose template drops what stands before "=" in earlier answers: branches
agents     contexts as somebody else might ask: the last one gone on from, an earlier one, one cut down, one asked
           twice, one that has nothing to do with the rest
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.learner.model.load import Policy, load_model
from streamrl.learner.model.logprobs import Head
from streamrl.learner.model.packing import Piece, pack
from streamrl.protocol.wire.group import Sample, decode_body, decode_header, encode_group
from streamrl.workers.engines.base import Engine, Generated, KvCache, SampleRequest
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.environments.trace import Trace
from tests.helpers import make_group, make_ticket
from tests.integration.engine_world import Served
from tests.tiny_models import CHARACTERS

DROPS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'].split('=')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SAMPLING = schema.Sampling(max_tokens=12, min_tokens=3)
_SETTINGS = schema.Environment(target="m:f", max_turns=5, max_tokens=160)
_LIMIT_S = 3.0  # an episode, on a machine that has much else to do


@dataclass(slots=True, kw_only=True)
class Turn:
    context: list[int]
    version: int  # that was served when it was asked for
    generated: Generated


@dataclass(slots=True, kw_only=True)
class Episode:
    prompt: list[int]
    turns: list[Turn] = field(default_factory=list)  # as the engine saw them
    sample: Sample | None = None


class Watched:
    """The engine, of which each episode sees its own half: what it was asked and what it said is noted."""

    def __init__(self, engine: Engine, episode: Episode, versions: list[int]) -> None:
        self._engine, self._episode, self._versions = engine, episode, versions

    async def generate(self, request: SampleRequest) -> Generated:
        version = self._versions[-1]
        generated = await self._engine.generate(request)
        context = request.prompt_ids.tolist()
        self._episode.turns.append(Turn(context=context, version=version, generated=generated))
        return generated


async def play_all(
    served: Served, count: int, *, kv_cache: KvCache, seed: int = 0
) -> tuple[list[Episode], dict[int, int]]:
    """(the episodes, which model each version is): a third of each kind, side by side, while weights change."""
    served.facts.tokenizer.chat_template = DROPS
    models: dict[int, int] = {}
    versions: list[int] = []

    async def load(model: int) -> None:
        version = await served.load(model, kv_cache)
        models[version] = model
        versions.append(version)

    await load(0)
    episodes: list[Episode] = []
    busy = asyncio.Semaphore(48)

    async def one(at: int) -> None:
        async with busy:
            episodes.append(await _KINDS[at % len(_KINDS)](served, random.Random(seed * 10_000 + at), at, versions))

    async with asyncio.timeout(60 + _LIMIT_S * count):
        playing = asyncio.gather(*(one(at) for at in range(count)))
        model = 0
        while not playing.done():
            model = (model + 1) % 3
            about = [served.engine.generate(replace(served.request([3 + n]), sampling=SAMPLING)) for n in range(4)]
            await asyncio.gather(*about)  # so long the episodes go on under these weights
            await load(model)
        await playing
    return episodes, models


async def _lines(served: Served, rng: random.Random, at: int, versions: list[int]) -> Episode:
    prompt = [rng.randrange(3, 3 + len(CHARACTERS)) for _ in range(rng.randint(1, 20))]
    return await _play(served, rng, Episode(prompt=prompt), versions, at, {})


async def _drops(served: Served, rng: random.Random, at: int, versions: list[int]) -> Episode:
    messages = [{"role": "user", "content": _words(rng)}]
    tokenizer: Any = served.facts.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return await _play(served, rng, Episode(prompt=prompt), versions, at, {"messages": messages})


async def _play(
    served: Served, rng: random.Random, episode: Episode, versions: list[int], at: int, fields: dict[str, Any]
) -> Episode:
    num_turns = rng.randint(1, 6)
    environment = EnvironmentDouble(lambda row, said: Answer(given=_words(rng), done=len(said) == num_turns))
    player = Player(environment, tail=Tail(served.facts.tokenizer), settings=_SETTINGS)
    request = replace(served.request(episode.prompt), sampling=SAMPLING)
    watched: Any = Watched(served.engine, episode, versions)
    episode.sample = (await player.play(make_ticket(at, fields=fields), watched, request)).sample
    return episode


async def _agents(served: Served, rng: random.Random, at: int, versions: list[int]) -> Episode:
    episode = Episode(prompt=[rng.randrange(3, 40) for _ in range(rng.randint(1, 9))])
    watched, trace = Watched(served.engine, episode, versions), Trace(np.asarray(episode.prompt, np.int32))
    known = [episode.prompt]
    for _ in range(rng.randint(1, 6)):
        context = list(rng.choice([known[-1], rng.choice(known)]))
        context = context[: rng.randint(0, len(context))] if rng.random() < 0.2 else context
        context += [rng.randrange(3, 40) for _ in range(rng.choice([0, 1, 4, 8]))]
        context = context or [3]
        request = replace(served.request(context), sampling=SAMPLING)
        generated = await watched.generate(request)
        trace.take(request.prompt_ids, generated)
        known.append([*context, *generated.token_ids.tolist()])
    episode.sample = trace.played("stop", 0.0).sample
    return episode


_KINDS = (_lines, _drops, _agents)


def _words(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS.replace("=", ""), k=rng.randint(1, 6)))


def through_the_wire(episode: Episode) -> Sample:
    assert episode.sample is not None
    group = make_group(make_ticket(1), samples=(episode.sample,))
    header, body = encode_group(replace(group, prompt_ids=np.asarray(episode.prompt, np.int32)))
    return decode_body(decode_header(header), body).samples[0]


def learners_logprobs(
    served: Served, model: int, episodes: Sequence[tuple[Sequence[int], Sample]]
) -> list[npt.NDArray[np.float64]]:
    """Of each sample's trained tokens, NaN elsewhere: through packing and the policy, as they are trained."""
    head = Head(end_ids=served.facts.stop_ids)
    folder, least = str(served.folders[model]), SAMPLING.min_tokens
    policy = Policy(load_model(folder), head=head, min_tokens=least, dtype=torch.float32)
    pieces = [
        Piece(
            sample=i,
            group=i,
            prompt_ids=np.asarray(prompt, np.int32),
            token_ids=one.token_ids,
            behaviour_logprobs=one.logprobs,
            mask=one.loss_mask(),
            turns=tuple(begin for begin, _ in one.turns()),
            branches=one.branches,
        )
        for i, (prompt, one) in enumerate(episodes)
    ]
    found = [np.full(len(one.token_ids), np.nan) for _, one in episodes]
    with torch.no_grad():
        for batch in pack(pieces, max_tokens=2000, shape=policy.shape):
            logp = policy(batch).logp
            for sample, position, value in zip(batch.sample.tolist(), batch.position.tolist(), logp, strict=True):
                found[sample][position] = float(value)
    return found
