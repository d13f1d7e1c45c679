"""Scoring a set of prompts once, outside of any run: an engine, the rewards, and what they add up to.

    prompts ─► `max_groups_in_flight` at once: samples, each scored (workers.answer) ─► answers ─► Result

Blocks on the engine and the rewards, at most `validation.timeout_s` altogether; what is not answered by then counts as
unanswered, and the result says so. RewardOutage when a source stays out for longer than its `outage_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.ticket import Ticket
from streamrl.tasks import gather_or_cancel
from streamrl.versions import make_version
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Engine, EngineSettings, make_engine
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.rewards.base import Rewards

_UID = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompt:
    text: str
    token_ids: npt.NDArray[np.int32]  # [P]
    fields: Mapping[str, Any] = field(default_factory=dict)  # handed to the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    num_prompts: int
    num_answered: int
    num_failed: int  # no sample had a score, or too few; the rest was out of time
    num_samples: int
    duration_s: float
    num_tokens: int
    reward: float | None  # mean over samples; None, here and below, when nobody answered
    reward_error: float | None  # standard error of that mean, prompt by prompt; None for a single one
    rewards: Mapping[str, float]  # by source, before weights
    response_length: float | None
    finished: float | None  # share that ended by themselves
    groups: tuple[Group | None, ...]  # by prompt

    def to_json(self) -> dict[str, Any]:
        """What `streamrl eval --json` prints."""
        shown = (one.name for one in fields(self) if one.name not in ("groups", "rewards"))
        return {name: getattr(self, name) for name in shown} | {"rewards": dict(self.rewards)}


async def evaluate(
    prompts: Sequence[EvalPrompt],
    *,
    config: schema.Config,
    model: ModelFacts,
    weights: Path,
    step: int,
    rewards: Rewards,
    show: Callable[[int], None] = lambda num_done: None,
) -> Result:
    """With the engine that `worker.engine` names, started and stopped here. `show` hears how many prompts are done."""
    config = _fitted(config, prompts)
    engine = make_engine(EngineSettings(model=model, config=config, seed=config.seed))
    try:
        await rewards.start()  # closes all of them where one fails
        await engine.start()
        await engine.load(weights, version=make_version(1, 0), step=step)
        answerer = Answerer(rewards=rewards, config=config, worker=_UID, fingerprint=model.fingerprint)
        began = time.monotonic()
        groups = await _answers([_ticket(i, p, config) for i, p in enumerate(prompts)], engine, answerer, config, show)
        return summarise(groups, duration_s=time.monotonic() - began)
    finally:
        await engine.stop()
        await rewards.close()


def summarise(groups: Sequence[Group | None], *, duration_s: float) -> Result:
    answered = [group for group in groups if group is not None and not group.header.failed]
    samples = [sample for group in answered for sample in group.samples]
    sources = sorted({source for sample in samples for source in sample.rewards})
    return Result(
        num_prompts=len(groups),
        num_answered=len(answered),
        num_failed=sum(group is not None and group.header.failed for group in groups),
        num_samples=len(samples),
        duration_s=duration_s,
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        reward=_mean(sample.reward for sample in samples),
        reward_error=_standard_error([fmean(sample.reward for sample in group.samples) for group in answered]),
        rewards={source: fmean(s.rewards[source] for s in samples if source in s.rewards) for source in sources},
        response_length=_mean(len(sample.token_ids) for sample in samples),
        finished=_mean(sample.finish_reason == "stop" for sample in samples),
        groups=tuple(groups),
    )


async def _answers(
    tickets: Sequence[Ticket],
    engine: Engine,
    answerer: Answerer,
    config: schema.Config,
    show: Callable[[int], None],
) -> list[Group | None]:
    """An engine that dies ends the evaluation, and rewards that stay out do."""
    room = asyncio.Semaphore(config.worker.max_groups_in_flight)
    groups: dict[int, Group] = {}

    async def answer(ticket: Ticket) -> None:
        async with room:
            groups[ticket.number] = await answerer.answer(ticket, engine)
        show(len(groups))

    show(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.validation.timeout_s):
            await gather_or_cancel({f"prompt {ticket.number}": answer(ticket) for ticket in tickets})
    return [groups.get(ticket.number) for ticket in tickets]


def _fitted(config: schema.Config, prompts: Sequence[EvalPrompt]) -> schema.Config:
    """With room in the engine for what is asked, and not for what training would ask."""
    sampling = schema.Sampling(**config.validation.sampling.model_dump())
    longest = max(len(prompt.token_ids) for prompt in prompts)
    data = config.data.model_copy(update={"max_prompt_tokens": longest})
    return config.model_copy(update={"sampling": sampling, "data": data})


def _ticket(number: int, prompt: EvalPrompt, config: schema.Config) -> Ticket:
    return Ticket(
        number=number,
        run_uid=_UID,
        purpose="eval",
        data_epoch=0,
        prompt_index=number,
        prompt=prompt.text,
        token_ids=prompt.token_ids,
        fields=prompt.fields,
        num_samples=config.validation.sampling.num_samples,
    )


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _standard_error(means: Sequence[float]) -> float | None:
    """Samples of one prompt are alike, so prompts are what is counted."""
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
