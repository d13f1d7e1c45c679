"""The minimum that a run's tokens need: vLLM alone for generated tokens, plain passes for trained ones.

Both are warmed up, and process as much at once as in the run: as many samples are in vLLM at any time, and where one
ends another begins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bench.descendants import Spent
from streamrl.config import schema

_ROUNDS = 3


class Cost(NamedTuple):
    """Cost per token."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    made: Cost
    trained: Cost


def bare(config: schema.Config, size: str, *, answer: float) -> Bare:
    """Measure a model of this size under this configuration; `answer`: the mean answer length of the run."""
    return Bare(made=asyncio.run(_made(config)), trained=_trained(config, size, answer))


async def _made(config: schema.Config) -> Cost:
    from bench.whole_model import PROMPT_TOKENS
    from streamrl.workers.engines.base import EngineSettings
    from streamrl.workers.engines.model import read_model
    from streamrl.workers.engines.vllm.engine import VllmEngine
    from streamrl.workers.engines.vllm.requests import sampling_params

    facts = read_model(config.model.path, trust_remote_code=False)
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    await engine.start()
    try:
        llm, params = engine.bare(), sampling_params(config.sampling, facts)
        count = config.training.groups_per_step * config.sampling.num_samples

        async def one(number: int) -> int:
            prompt = [2 + (number * 7 + place) % 60 for place in range(PROMPT_TOKENS)]
            outputs = llm.generate({"prompt_token_ids": prompt}, params, f"{time.monotonic()}-{number}")
            return sum([len(output.outputs[0].token_ids) async for output in outputs])

        return await steady(one, count, Spent(os.getpid()))
    finally:
        await engine.stop()


async def steady(one: Callable[[int], Awaitable[int]], count: int, spent: Spent) -> Cost:
    """Keep `count` calls of `one` under way, each of which returns its tokens; return what a token costs meanwhile. The
    first `count` to end are the warm-up, and each round ends with as many more.
    """
    tokens: asyncio.Queue[int] = asyncio.Queue()

    async def ask(number: int) -> None:
        while True:
            tokens.put_nowait(await one(number))
            number += count

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(number)) for number in range(count)]
        rounds = []
        for _ in range(1 + _ROUNDS):
            before, began = _cpu_s(spent), time.perf_counter()
            num_tokens = sum([await tokens.get() for _ in range(count)])
            rounds.append(Cost((_cpu_s(spent) - before) / num_tokens, (time.perf_counter() - began) / num_tokens))
        for task in asking:
            task.cancel()
    return _middle(rounds[1:])


def _trained(config: schema.Config, size: str, answer: float) -> Cost:
    import torch

    from bench.long_tailed import Lengths, make_groups
    from bench.stepping import Stepping
    from bench.whole_model import MAX_LENGTH, PROMPT_TOKENS, SIZES

    torch.set_num_threads(1)
    shape = SIZES[size]
    fixed = shape.vocabulary > 64
    spread = 0.0 if fixed else 0.9
    middle = int(answer if fixed else answer / 1.5)  # median of a log-normal of that spread, from its mean
    lengths = Lengths(
        prompt=(PROMPT_TOKENS, PROMPT_TOKENS + 1), median=middle, spread=spread, longest=config.sampling.max_tokens
    )
    groups = make_groups(
        config.training.groups_per_step, num_samples=config.sampling.num_samples, lengths=lengths,
        vocabulary=shape.vocabulary,
    )  # fmt: skip
    stepping = Stepping(shape, config, max_length=MAX_LENGTH, device=torch.device("cpu"))
    packed, num_tokens = stepping.pack(groups), stepping.num_tokens(groups)
    return _of_passes(lambda: stepping.bare(packed), num_tokens)


def _of_passes(work: Callable[[], None], num_tokens: int) -> Cost:
    work()
    rounds = []
    for _ in range(_ROUNDS):
        cpu, began = time.process_time(), time.perf_counter()
        work()
        rounds.append(Cost((time.process_time() - cpu) / num_tokens, (time.perf_counter() - began) / num_tokens))
    return _middle(rounds)


def _middle(rounds: list[Cost]) -> Cost:
    return Cost(median(one.cpu_s for one in rounds), median(one.wall_s for one in rounds))


def _cpu_s(spent: Spent) -> float:
    return time.process_time() + sum(spent.look().values())
