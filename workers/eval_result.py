"""What an evaluation asks, what was answered so far, and the figures of it: means over prompts, with their errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.protocol.wire.group import Group
from streamrl.recipe.held_out import (
    AnswerSearch,
    JudgedSample,
    judge_samples,
    majority,
    mean_over_prompts,
    passes,
    rewards_by_source,
    wilson,
)
from streamrl.workers.engines.model import ModelFacts


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
    num_failed: int  # too few samples had a score; other unanswered prompts: time ran out, or an error ended it
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


class Answers:
    """The prompts of an evaluation and their answers so far."""

    def __init__(self, prompts: Sequence[EvalPrompt], *, config: schema.Config, model: ModelFacts) -> None:
        self.prompts = prompts
        self._groups: dict[int, Group] = {}  # by the prompt's place
        self._summarise = partial(summarise, settings=config.validation, decode=model.decode)
        self._duration_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that answering takes, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._duration_s = time.monotonic() - began

    def add(self, place: int, group: Group) -> None:
        self._groups[place] = group

    def __len__(self) -> int:
        return len(self._groups)

    def result(self) -> Result:
        by_dataset: dict[str, list[Group | None]] = {}
        groups = [self._groups.get(place) for place in range(len(self.prompts))]
        for prompt, group in zip(self.prompts, groups, strict=True):
            if prompt.dataset:
                by_dataset.setdefault(prompt.dataset, []).append(group)
        summary = partial(self._summarise, duration_s=self._duration_s)
        datasets = {name: summary(of_dataset) for name, of_dataset in by_dataset.items()}
        return replace(summary(groups), datasets=datasets)


def _judged(
    groups: Sequence[Group], settings: schema.Validation, decode: Callable[[list[int]], str]
) -> list[list[JudgedSample]]:
    """Judge each group's samples; empty if `validation.pass_by` is not set."""
    if settings.pass_by is None:
        return []
    judge = partial(
        judge_samples,
        by=settings.pass_by,
        at_least=settings.pass_score,
        search=None if settings.answer is None else AnswerSearch(settings.answer),
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


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _standard_error(means: Sequence[float]) -> float | None:
    """Samples of one prompt are correlated, so the unit is the prompt."""
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
