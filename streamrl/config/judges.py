"""The settings of a reward source whose judges are models. `streamrl.config.schema` has all others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamrl.settings import DeepArguments, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class Judge(Section):
    """A model behind a URL in OpenAI's form."""

    url: str  # as its clients are told it: https://host/v1
    model: str
    replicas: tuple[str, ...] = ()  # further addresses of the same model, asked in turn
    token_file: str | None = None  # a file that holds the key, or ...
    token_env: str | None = None  # ... the variable of the worker's that does, where the worker allows it
    options: DeepArguments = Field(default_factory=dict)  # further fields of each request; null takes one of ours out

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)


class JudgeReward(Section):
    """Models that are asked what an answer is worth; what they say is brought to 0 to 1."""

    type: Literal["judge"]
    judges: dict[str, Judge]  # by names of yours; all of them are asked
    rubric: str  # what is good, in words
    form: Literal["pointwise", "pairwise"] = "pointwise"  # each for itself | which of two is better, in both orders
    scale: tuple[int, int] = (1, 10)  # pointwise: worst and best
    against: str | None = None  # pairwise: the row's field that holds the other one; null: others of the group
    opponents: Positive = 2  # of the group: so many neighbours are compared with on each side
    show: tuple[str, ...] = ()  # fields of the row that judges are shown, a right answer for one
    combine: Literal["mean", "majority"] = "mean"  # of several judges
    structured: bool = True  # the answer's JSON schema goes along; false: for services that know none
    explain: bool = False  # the judge writes its reasons before its verdict
    temperature: NonNegativeFloat = 0.0
    max_tokens: Positive = 512  # of a judge's answer
    weight: float = 1.0
    timeout_s: PositiveFloat = 60.0  # for one request
    attempts: Positive = 5  # tries before the sample counts as failed
    outage_s: PositiveFloat = 600.0  # how long samples wait while none can be asked; then their tickets go back
    max_concurrency: Positive = 64  # requests at the same time to one judge; this and what follows: of one worker
    max_requests_per_s: PositiveFloat | None = None  # to one judge
    token_budget: Positive | None = None  # read and written by all judges since the worker began; then it is an outage
    cache_size: NonNegative = 10_000  # verdicts a judge that are kept: the same question is asked once; 0: off

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url for judge in self.judges.values() for url in judge.urls)

    @property
    def max_abs(self) -> float:
        return 1.0

    @property
    def of_group(self) -> bool:
        return self.form == "pairwise" and self.against is None
