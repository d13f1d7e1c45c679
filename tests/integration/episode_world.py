"""Random rollouts of several turns on a real engine, of all kinds that there are, and what the learner makes of them.

lines      an environment behind a prompt that is text
drops      a chat whose template drops what stands before "=" in earlier answers: branches
agents     contexts as somebody else might ask: the last one gone on from, an earlier one, one cut down, one asked
           twice, one that has nothing to do with the rest
calls      an agent's chat through a session, with calls of a tool: gone on with, cut down, asked again, a helper's
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.data.settings import DATE
from streamrl.learner.loading.build import load_model
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy
from streamrl.learner.packing.micro_batches import Piece
from streamrl.learner.packing.pack import pack
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample
from streamrl.workers.engines.base import Engine, Generated, KvCache, SampleRequest
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.sessions import openai_answers
from streamrl.workers.sessions.openai_requests import ChatRequest, Refused
from streamrl.workers.sessions.session import Model, Session
from streamrl.workers.sessions.tool_calls import Reply, ToolCall, Tools
from streamrl.workers.sessions.trace import Trace
from tests.brute_force import check_by_brute_force
from tests.helpers import make_group, make_ticket
from tests.integration.engine_world import Served
from tests.integration.learner_ranks import never_round
from tests.tiny_models import CHARACTERS

DROPS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'].split('=')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CALLS = (
    "{% for tool in tools or [] %}tool {{ tool['function']['name'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% for call in m['tool_calls'] or [] %} > "
    "{% for value in call['function']['arguments'].values() %}{{ value }}{% endfor %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = schema.Sampling(max_tokens=12, min_tokens=3)
_SETTINGS = schema.Environment(target="m:f", max_turns=5, max_tokens=160)
_OF_AGENTS = schema.Environment(target="m:f", max_turns=6, max_tokens=240)
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
    served: Served, count: int, *, kv_cache: KvCache, seed: int = 0, limit_s: float = _LIMIT_S
) -> tuple[list[Episode], dict[int, int]]:
    """(the episodes, which model each version is): as many of each kind, side by side, while weights change."""
    served.facts.tokenizer.chat_template = _with_its_end(DROPS, served)
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

    async with asyncio.timeout(60 + limit_s * count):
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
    environment = EnvironmentDouble(lambda row, said: Answer(observation=_words(rng), done=len(said) == num_turns))
    player = Player(environment, tail=Tail(served.facts.tokenizer, date=DATE), settings=_SETTINGS)
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


async def _calls(served: Served, rng: random.Random, at: int, versions: list[int]) -> Episode:
    tokenizer: Any = copy.deepcopy(served.facts.tokenizer)
    tokenizer.chat_template = _with_its_end(CALLS, served)
    said: list[dict[str, Any]] = [{"role": "user", "content": _words(rng)}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    episode = Episode(prompt=tokenizer(text, add_special_tokens=False)["input_ids"])
    watched: Any = Watched(served.engine, episode, versions)
    with ThreadPoolExecutor(1) as thread:
        facts = replace(served.facts, tokenizer=tokenizer)
        model = Model(facts=facts, parse=_parse, settings=_OF_AGENTS, date=DATE, max_length=380, thread=thread)
        session = Session(model, watched, replace(served.request(episode.prompt), sampling=SAMPLING))
        has_grown = False
        for _ in range(rng.randint(1, 6)):
            asked = ChatRequest(messages=said, tools=[ADD], tool_choice=rng.choice(["auto", "auto", "none"]))
            try:
                answered = await session.chat(asked)
            except Refused:
                if not session.spent:
                    raise
                break
            if has_grown:
                before, after = episode.turns[-2:]
                so_far = [*before.context, *before.generated.token_ids.tolist()]
                assert after.context[: len(so_far)] == so_far, "what was sampled was written anew"
            message = openai_answers.chat(answered, asked)["choices"][0]["message"]
            grown = [*said, message, *_to(message, rng)]
            has_grown = rng.random() < 0.8
            said = grown if has_grown else rng.choice([said, said[: rng.randint(1, len(said))], grown[-1:]])
    episode.sample = session.trace.played("stop", 0.0).sample
    await session.close()
    return episode


_KINDS = (_lines, _drops, _agents, _calls)


def _with_its_end(template: str, served: Served) -> str:
    return template.replace("<eos>", str(served.facts.tokenizer.decode([served.facts.stop_ids[0]])))


def _parse(text: str, tools: Tools) -> Reply:
    """Many answers of a model that knows nothing are calls."""
    content, sign, rest = re.split(r"([-+=>?])", text, maxsplit=1) if re.search(r"[-+=>?]", text) else (text, "", "")
    calls = (ToolCall(name="add", arguments=json.dumps({"a": rest})),) if sign else ()
    return Reply(content=content, calls=calls)


def _to(message: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """What an agent sends back."""
    if not message.get("tool_calls"):
        return [{"role": "user", "content": _words(rng)}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": _words(rng)} for call in message["tool_calls"]]


def _words(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS.replace("=", ""), k=rng.randint(1, 6)))


def through_the_wire(episode: Episode) -> Sample:
    assert episode.sample is not None
    group = make_group(make_ticket(1), samples=(episode.sample,))
    header, body = encode_group(replace(group, prompt_ids=np.asarray(episode.prompt, np.int32)))
    return decode_body(decode_header(header), body).samples[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    off: list[float]  # of each token whose log-prob must be its version's
    num_tokens: int  # that are trained
    num_episodes: int
    num_across: int  # episodes with tokens of several versions
    num_loads: int
    num_branches: int

    def __str__(self) -> str:
        return (
            f"{len(self.off)} of {self.num_tokens} tokens of {self.num_episodes} episodes, {self.num_across} across "
            f"loads ({self.num_loads} of them), {self.num_branches} branches: off by {max(self.off):.1e}"
        )


def compare(
    served: Served,
    episodes: Sequence[Episode],
    models: dict[int, int],
    *,
    kv_cache: KvCache,
    dtype: torch.dtype = torch.float32,
) -> Compared:
    """Ids, masks and spans by brute force; log-probs with the learner's, where these must be the same."""
    samples = [through_the_wire(episode) for episode in episodes]
    for episode, sample in zip(episodes, samples, strict=True):
        check_by_brute_force(episode.prompt, sample, [(turn.context, turn.generated) for turn in episode.turns])
    asked = [(episode.prompt, sample) for episode, sample in zip(episodes, samples, strict=True)]
    learnt = {model: learners_logprobs(served, model, asked, dtype) for model in set(models.values())}
    off, num_tokens = [], 0
    for i, (episode, sample) in enumerate(zip(episodes, samples, strict=True)):
        # What a load found at work has keys and values of the version before, unless the cache was cleared.
        begun = {turn.generated.logprobs.tobytes(): turn.version for turn in episode.turns}
        for start, end in sample.turns():
            num_tokens += end - start
            spans = [span for span in sample.spans if start <= span.start < end]
            begun_with = begun[sample.logprobs[start:end].tobytes()]
            if kv_cache == "salt" and {span.version for span in spans} != {begun_with}:
                continue
            for span in spans:
                off += [
                    abs(float(sample.logprobs[at]) - learnt[models[span.version]][i][at])
                    for at in range(span.start, span.end)
                ]
    return Compared(
        off=off,
        num_tokens=num_tokens,
        num_episodes=len(episodes),
        num_across=sum(len({span.version for span in sample.spans}) > 1 for sample in samples),
        num_loads=len(models),
        num_branches=sum(len(sample.branches) for sample in samples),
    )


def learners_logprobs(
    served: Served, model: int, episodes: Sequence[tuple[Sequence[int], Sample]], dtype: torch.dtype = torch.float32
) -> list[npt.NDArray[np.float64]]:
    """Of each sample's trained tokens, NaN elsewhere: through packing and the policy, as they are trained."""
    head = Head(end_ids=served.facts.stop_ids, compute_dtype=dtype)
    folder, least = str(served.folders[model]), SAMPLING.min_tokens
    policy = Policy(load_model(folder).to(dtype), head=head, min_tokens=least, dtype=dtype)
    if dtype == torch.float64:
        never_round(policy)
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
