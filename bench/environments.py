"""Multi-turn rollouts: the cost of the session endpoint, the cache hit rate on earlier turns, and how busy the engine
stays when environments are slow.

    agents   an agent on the openai package, in its child process ─► HTTP ─► session ─► vLLM, many at once
    direct   the same turns, of the same lengths, requested from the same engine directly

One vLLM serves both, with a 25M-parameter model. Blocks on its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.environments_agent import GIVEN
from bench.measure import Say, environment_as_it_was
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import Ticket
from streamrl.tasks import cancel_all
from streamrl.versions import make_version
from streamrl.workers.engines.base import EngineSettings, Generated, Load, SampleRequest
from streamrl.workers.engines.model import ModelFacts, read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.environments.playing import Plays, playing

_AGENT = "bench.environments_agent:talk"
_TURNS = 4
_AT_ONCE, _SLEEPING, _WITH_LONG_CONTEXTS = 48, 160, 12
_SHORT, _LONG = 32, 1500  # prompt tokens
_LOOK_EVERY_S = 0.01
_TEMPLATE = (
    "{% for m in messages %}{{ 'U:' if m['role'] == 'user' else 'A:' }}{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    turn_tokens: int
    num_rounds: int
    num_rollouts: int  # per round and side
    num_long: int  # rollouts with long contexts
    seconds: float  # of the measurement with pauses


_WHOLE = _Size(turn_tokens=64, num_rounds=4, num_rollouts=72, num_long=24, seconds=30.0)
_QUICK = _Size(turn_tokens=24, num_rounds=1, num_rollouts=12, num_long=2, seconds=2.0)


def bench(*, quick: bool, say: Say) -> list[Line]:
    with scratch_folder() as folder, environment_as_it_was():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
        return asyncio.run(_measure(folder, size=_QUICK if quick else _WHOLE, say=say))


async def _measure(folder: Path, *, size: _Size, say: Say) -> list[Line]:
    say("starting vLLM with 25 million parameters")
    async with _opened(folder, size.turn_tokens) as scene:
        await scene.agents(8)  # warm up code and connections
        rounds = []
        for number in range(size.num_rounds):
            rounds.append(await _round(scene, size.num_rollouts, direct_first=number % 2 == 0))
            say(f"round {number + 1}: direct {rounds[-1][0]:,.0f}, through sessions {rounds[-1][1]:,.0f} tokens/s")
        served = await scene.cached(size.num_long)
        say(f"{served:.1%} of the reusable blocks came from the cache")
        busy, pace = await scene.sleeping(size.seconds)
        say(f"with pauses of 1 s the engine is busy for {busy:.1%} of the time, at {pace:,.0f} tokens/s")
    direct = median(one[0] for one in rounds)
    return [
        Bar(
            name="25M, 4 turns: sessions / direct",
            value=median(through / alone for alone, through in rounds),
            unit="x",
            goal=0.9,
            better="higher",
        ),
        Bar(name="reusable blocks from the cache", value=served, unit="x", goal=0.9, better="higher"),
        Bar(name="engine busy, pauses of 1 s a turn", value=busy, unit="x", goal=0.9, better="higher"),
        Fact(name="direct", value=direct, unit="tokens/s"),
        Fact(name=f"{_SLEEPING} rollouts with pauses", value=pace, unit="tokens/s"),
    ]


async def _round(scene: _Scene, num_rollouts: int, *, direct_first: bool) -> tuple[float, float]:
    """Return (direct, through sessions). The sides take turns going first, since the machine's speed drifts."""
    if direct_first:
        return await scene.direct(num_rollouts), await scene.agents(num_rollouts)
    through = await scene.agents(num_rollouts)
    return await scene.direct(num_rollouts), through


class _Engine(VllmEngine):
    """Records how much of each context came from the cache."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.contexts: dict[str, tuple[int, int, int]] = {}  # by request: tokens in total, cached, sampled

    async def _final(self, token_ids: Any, params: Any, request_id: str, *more: Any, **how: Any) -> Any:
        final = await super()._final(token_ids, params, request_id, *more, **how)
        self.contexts[request_id] = (len(token_ids), final.num_cached_tokens or 0, len(final.outputs[0].token_ids))
        return final


class _Scene:
    def __init__(self, engine: _Engine, player: Plays, facts: ModelFacts, sampling: schema.Sampling) -> None:
        self._engine, self._player = engine, player
        self._facts, self._sampling = facts, sampling
        self._num_rollouts = 0

    async def agents(self, num_rollouts: int) -> float:
        """Return tokens per second."""
        return await self._tokens_per_s([self._play(_SHORT) for _ in range(num_rollouts)])

    async def direct(self, num_rollouts: int) -> float:
        return await self._tokens_per_s([self._ask_directly() for _ in range(num_rollouts)])

    async def cached(self, num_rollouts: int) -> float:
        """Return the fraction of full blocks of earlier turns that the cache still held."""
        self._engine.contexts.clear()
        places = asyncio.Semaphore(_WITH_LONG_CONTEXTS)
        await asyncio.gather(*(self._play(_LONG, places=places) for _ in range(num_rollouts)))
        block: int = self._engine.bare().vllm_config.cache_config.block_size
        found = reusable = 0
        for request_id, (_, cached, _) in self._engine.contexts.items():
            rollout, _, turn = request_id.rpartition("-")
            if (before := self._engine.contexts.get(f"{rollout}-{int(turn) - 1}")) is not None:
                whole = (before[0] + before[2] - 1) // block * block  # the last token was never an input
                found, reusable = found + min(cached, whole), reusable + whole
        return found / reusable

    async def sleeping(self, seconds: float) -> tuple[float, float]:
        """Return (fraction of time in which the engine was busy, tokens per second), once rollouts are spread out."""

        async def on_and_on() -> None:
            while True:
                await self._play(_SHORT, pause_s=1.0)

        rollouts = [asyncio.create_task(on_and_on(), name="rollout") for _ in range(_SLEEPING)]
        try:
            await asyncio.sleep(seconds / 2)
            looks, began, made = [], time.perf_counter(), self._engine.stats().num_made
            while (elapsed := time.perf_counter() - began) < seconds:
                stats = self._engine.stats()
                looks.append(stats.in_flight - stats.num_waiting > 0)
                await asyncio.sleep(_LOOK_EVERY_S)
            return sum(looks) / len(looks), (self._engine.stats().num_made - made) / elapsed
        finally:
            await cancel_all(rollouts)

    async def _tokens_per_s(self, rollouts: list[Any]) -> float:
        places, made = asyncio.Semaphore(_AT_ONCE), self._engine.stats().num_made

        async def in_turn(rollout: Any) -> None:
            async with places:
                await rollout

        began = time.perf_counter()
        await asyncio.gather(*map(in_turn, rollouts))
        return (self._engine.stats().num_made - made) / (time.perf_counter() - began)

    async def _play(self, length: int, *, pause_s: float = 0.0, places: asyncio.Semaphore | None = None) -> None:
        text, request = self._begin(length)
        fields = {"said": text, "turns": _TURNS, "pause_s": pause_s}
        ticket = Ticket(
            number=self._num_rollouts,
            run_uid="0",
            purpose="train",
            data_epoch=0,
            prompt_index=0,
            prompt="",
            token_ids=request.prompt_ids,
            num_samples=1,
            fields=fields,
        )
        async with places or contextlib.nullcontext():
            await self._player.play(ticket, self._engine, request)

    async def _ask_directly(self) -> None:
        _, request = self._begin(_SHORT)
        tail = np.array(self._ids(f"<end>U:{GIVEN}<end>A:"), np.int32)
        context = request.prompt_ids
        for turn in range(_TURNS):
            turn_request = replace(request, request_id=f"{request.request_id}-{turn}", prompt_ids=context)
            made: Generated = await self._engine.generate(turn_request)
            context = np.concatenate([context, made.token_ids, tail])

    def _begin(self, length: int) -> tuple[str, SampleRequest]:
        self._num_rollouts += 1
        rng = np.random.default_rng(self._num_rollouts)
        text = "".join(chr(c) for c in rng.integers(65, 91, size=length))
        ids = np.array(self._ids(f"U:{text}<end>A:"), np.int32)
        return text, SampleRequest(request_id=f"rollout-{self._num_rollouts}", prompt_ids=ids, sampling=self._sampling)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._facts.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@contextlib.asynccontextmanager
async def _opened(folder: Path, turn_tokens: int) -> AsyncIterator[_Scene]:
    facts = _make_model(folder / "model")
    config = schema.Config(
        model=schema.Model(path=str(folder / "model")),
        data=schema.Data(train="", max_prompt_tokens=2 * _LONG),
        sampling=schema.Sampling(max_tokens=turn_tokens, min_tokens=turn_tokens),
        environment=schema.Environment(target=_AGENT, max_tokens=1024, timeout_s=300.0),
        weights=schema.Weights(dtype="float32"),
        worker=schema.Worker(threads=1),
    )
    engine = _Engine(EngineSettings(model=facts, config=config, seed=1))
    try:
        await engine.start()
        await engine.load(Load(weights=folder / "model" / "model.safetensors", version=make_version(1, 1), step=1))
        async with playing(config, Permissions(reward_code=(_AGENT,)), facts) as player:
            assert player is not None, "there is an environment"
            yield _Scene(engine, player, facts, config.sampling)
    finally:
        await engine.stop()


def _make_model(folder: Path) -> ModelFacts:
    """Create the model, with positions for long contexts and a chat template."""
    from bench.worker_model import MIDDLE, write_model  # imports torch

    write_model(folder, MIDDLE)
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "max_position_embeddings": 8192}))
    facts = read_model(str(folder), trust_remote_code=False)
    facts.tokenizer.chat_template = _TEMPLATE
    return facts
