"""Evaluates a set of prompts once, outside of a run: starts an engine, scores the samples and summarises them.

    `try_rewards` ─► each source has answered once
    prompts ─► `max_groups_in_flight` at a time: samples, each scored (workers.answer) ─► answers ─► Result

Blocks on the engine and the rewards, for `validation.timeout_s` at most in total; prompts without an answer by then are
counted as unanswered in the result. Raises RewardOutage when a source stays out for longer than its `outage_s`, or was
never reachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.errors import RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.held_out import (
    Judged,
    judge_samples,
    majority,
    mean_over_prompts,
    passes,
    rewards_by_source,
    wilson,
)
from streamrl.tasks import cancel_all, gather_or_cancel, run_beside
from streamrl.versions import make_version
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Engine, EngineSettings, Load, make_engine
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.playing import playing
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.chats import ends_of
from streamrl.workers.rewards.mixing import Rewards

_UID = "eval"
_LOOK_EVERY_S = 0.2
_SHOW_EVERY_S = 1.0
_NOTICE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompt:
    text: str
    token_ids: npt.NDArray[np.int32]  # [P]
    fields: Mapping[str, Any] = field(default_factory=dict)  # passed to the rewards
    dataset: str = ""  # its name in `data.validation`; empty where there is only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of the prompts, with its 95 % Wilson interval."""

    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    num_prompts: int
    num_answered: int
    num_failed: int  # too few samples had a score; the other unanswered prompts ran out of time
    num_samples: int
    duration_s: float
    num_tokens: int
    # Mean over prompts of each one's mean; like the other optional values, None if nothing was answered
    reward: float | None
    reward_error: float | None  # standard error of that mean; None for a single prompt
    rewards: Mapping[str, float]  # by source, unweighted; likewise means over prompts
    response_length: float | None
    finished: float | None  # share of samples that stopped by themselves
    groups: tuple[Group | None, ...]  # one per prompt
    pass_at: Mapping[int, Share] = field(default_factory=dict)  # by k; empty without validation.pass_by
    majority: Share | None = None  # None without validation.answer
    datasets: Mapping[str, Result] = field(default_factory=dict)  # one per data set, where there are several

    def to_json(self) -> dict[str, Any]:
        """What `streamrl eval --json` prints."""
        converted_below = ("groups", "rewards", "pass_at", "majority", "datasets")
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in converted_below}
        data["rewards"] = dict(self.rewards)
        if self.pass_at:
            data["pass_at"] = {str(k): asdict(share) for k, share in self.pass_at.items()}
        if self.majority is not None:
            data["majority"] = asdict(self.majority)
        if self.datasets:
            data["datasets"] = {name: one.to_json() for name, one in self.datasets.items()}
        return data


async def try_rewards(
    rewards: Rewards,
    item: ScoreItem,
    *,
    num_samples: int,
    patience_s: float,
    limit_s: float,
    show: Callable[[str], None] = lambda text: None,
    notice: Callable[[str], None] = lambda text: None,
) -> None:
    """Start all sources, wait until each has answered once (a refusal counts), and close them, so that an unusable
    source is found before a model is loaded. RewardOutage if one is unreachable for `patience_s`, or silent for
    `limit_s`."""
    await rewards.start()  # closes all of them if one fails
    began, outage = time.monotonic(), None
    scoring = asyncio.create_task(_first_score(rewards, item, num_samples), name="a first score")
    try:
        while not (await asyncio.wait([scoring], timeout=_LOOK_EVERY_S))[0]:
            waited_s, silent = time.monotonic() - began, rewards.silent()
            names = ", ".join(map(repr, silent))
            # None while a source that is out is being retried, which proves nothing yet.
            outage = rewards.outage() or (outage if set(silent.values()) - {"well"} else None)
            if outage and waited_s > patience_s:
                raise RewardOutage(f"{outage}; no score for {patience_s:g} s (--patience-s)")
            if waited_s > limit_s:
                raise RewardOutage(f"reward {names} has not answered a first request within {limit_s:g} s")
            show(f"waiting for a first score of {names}: {waited_s:.0f} s")
            if waited_s > _NOTICE_AFTER_S:
                notice(f"still waiting for a first score of {names}")
        scoring.result()
    except RewardOutage:
        raise
    except RewardError:
        pass  # reachable, which is enough: the sample is made up
    finally:
        await cancel_all([scoring])
        await rewards.close()


async def _first_score(rewards: Rewards, item: ScoreItem, num_samples: int) -> None:
    """Score two samples of one prompt, if a ticket has that many: a comparing source asks nothing for a single one."""
    scored = await rewards.score_sample(item)
    together = min(2, num_samples)
    await rewards.mix([item] * together, [scored] * together)


async def evaluate(
    prompts: Sequence[EvalPrompt],
    *,
    config: schema.Config,
    model: ModelFacts,
    weights: Path,
    step: int,
    rewards: Rewards,
    permissions: Permissions,
    show: Callable[[int], None] = lambda num_done: None,
) -> Result:
    """Evaluate with the engine that `worker.engine` names, started and stopped here. `show` is called each second with
    the number of prompts done."""
    config = _fitted(config, prompts)
    engine = make_engine(EngineSettings(model=model, config=config, seed=config.seed))
    try:
        await rewards.start()  # closes all of them if one fails
        await engine.start()
        await engine.load(Load(weights=weights, version=make_version(1, 0), step=step))
        tickets = [_ticket(i, prompt, config) for i, prompt in enumerate(prompts)]
        async with playing(config, permissions, model) as player:
            answerer = Answerer(
                rewards=rewards,
                config=config,
                worker=_UID,
                fingerprint=model.fingerprint,
                player=player,
                ends=ends_of(model.tokenizer, model.stop_ids),
            )
            began = time.monotonic()
            groups = await _answers(tickets, engine, answerer, config, show)
            duration_s = time.monotonic() - began
    finally:
        await engine.stop()
        await rewards.close()
    summary = partial(summarise, duration_s=duration_s, settings=config.validation, decode=model.decode)
    whole = summary(groups)
    by_dataset = {
        name: [group for prompt, group in zip(prompts, groups, strict=True) if prompt.dataset == name]
        for name in dict.fromkeys(prompt.dataset for prompt in prompts if prompt.dataset)
    }
    return replace(whole, datasets={name: summary(of_dataset) for name, of_dataset in by_dataset.items()})


def _judged(
    groups: Sequence[Group], settings: schema.Validation, decode: Callable[[list[int]], str]
) -> list[list[Judged]]:
    """Judge each group's samples; empty if `validation.pass_by` is not set."""
    if settings.pass_by is None:
        return []
    judge = partial(
        judge_samples,
        by=settings.pass_by,
        at_least=settings.pass_score,
        answer=settings.answer,
        stop=settings.sampling.stop,
        decode=decode,
    )
    return [judge(group.samples) for group in groups]


def summarise(
    groups: Sequence[Group | None],
    *,
    duration_s: float,
    settings: schema.Validation,
    decode: Callable[[list[int]], str],
) -> Result:
    answered = [group for group in groups if group is not None and not group.header.failed]
    samples = [sample for group in answered for sample in group.samples]
    judged = _judged(answered, settings, decode)
    voted = majority(judged) if settings.answer is not None else None
    passing = passes(judged, num_samples=settings.sampling.num_samples)
    return Result(
        num_prompts=len(groups),
        num_answered=len(answered),
        num_failed=sum(group is not None and group.header.failed for group in groups),
        num_samples=len(samples),
        duration_s=duration_s,
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        reward=mean_over_prompts([sample.reward for sample in group.samples] for group in answered),
        reward_error=_standard_error([fmean(sample.reward for sample in group.samples) for group in answered]),
        rewards=rewards_by_source([group.samples for group in answered]),
        response_length=_mean(len(sample.token_ids) for sample in samples),
        finished=_mean(sample.finish_reason == "stop" for sample in samples),
        groups=tuple(groups),
        pass_at={k: _share(one.share, one.num_prompts) for k, one in passing.items()},
        majority=None if voted is None else _share(voted, len(judged)),
    )


def _share(share: float, num_prompts: int) -> Share:
    low, high = wilson(share, num_prompts)
    return Share(share=share, low=low, high=high)


async def _answers(
    tickets: Sequence[Ticket],
    engine: Engine,
    answerer: Answerer,
    config: schema.Config,
    show: Callable[[int], None],
) -> list[Group | None]:
    """Answer all tickets in time. EngineError and RewardOutage end the evaluation."""
    room = asyncio.Semaphore(config.worker.max_groups_in_flight)
    groups: dict[int, Group] = {}

    async def answer(ticket: Ticket) -> None:
        async with room:
            groups[ticket.number] = await answerer.answer(ticket, engine)

    async def keep_showing() -> None:
        while True:
            show(len(groups))
            await asyncio.sleep(_SHOW_EVERY_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.validation.timeout_s):
            answers = gather_or_cancel({f"prompt {ticket.number}": answer(ticket) for ticket in tickets})
            await run_beside(answers, {"progress": keep_showing()})
    return [groups.get(ticket.number) for ticket in tickets]


def _fitted(config: schema.Config, prompts: Sequence[EvalPrompt]) -> schema.Config:
    """Size the engine for the evaluation's prompts and sampling instead of training's."""
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
    """Samples of one prompt are correlated, so the unit is the prompt."""
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
