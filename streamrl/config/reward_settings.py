"""What a run's rewards come from, and its own reward server: a part of `config.schema`, which has these names, too."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamrl.settings import (
    Arguments,
    DeepArguments,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class FunctionReward(Section):
    type: Literal["function"]
    target: str  # a built-in name, `package.module:function` or `path/to/file.py:function`
    of_group: bool = False  # it is called with all samples of a prompt at once, in TRL's form
    per_token: bool = False  # it returns a number for each token; the reward is their sum
    weight: float = 1.0
    max_abs: PositiveFloat = 1e6  # a score beyond is nonsense: the sample counts as failed
    timeout_s: PositiveFloat = 10.0
    memory_mb: Positive = 4096  # of one child process; beyond it the function gets a MemoryError
    options: Arguments = Field(default_factory=dict)  # keyword arguments of the function
    processes: Positive = 1  # child processes that run it side by side
    network: bool = False  # it may open connections, where its worker allows it
    environment: tuple[str, ...] = ()  # variables that it gets of its worker's, beside PATH, HOME and their like


class Tests(Section):
    """What a program is held to."""

    field: str = "tests"  # of the row: [{input, output}, ...], {inputs: [...], outputs: [...]}, or code, one or a list
    partial: bool = False  # the score is the share of tests that pass; false: 1 where all do, else 0
    time_s: PositiveFloat = 5.0  # of one test, computing and waiting; for a processor it may wait longer
    memory_mb: Positive = 512  # of one test


class CodeReward(Section):
    """The program in a completion, run against its row's tests in a sandbox of the worker."""

    type: Literal["code"]
    tests: Tests = Tests()
    weight: float = 1.0
    timeout_s: PositiveFloat = 60.0  # a program that had not its time by then is no 0: its sample fails
    processes: Positive = 2  # programs that run side by side

    @property
    def max_abs(self) -> float:
        return 1.0

    @property
    def environment(self) -> tuple[str, ...]:
        return ()


class HttpReward(Section):
    type: Literal["http"]
    url: str  # of a reward service: http://host:port
    replicas: tuple[str, ...] = ()  # further addresses of the same service, asked in turn
    # How it wants to be asked
    form: Literal["streamrl", "openrlhf", "vllm-classify", "vllm-pooling", "sandbox-fusion"] = "streamrl"
    tests: Tests = Tests()  # of form sandbox-fusion
    weight: float = 1.0
    max_abs: PositiveFloat = 1e6  # a score beyond is nonsense: the sample counts as failed
    timeout_s: PositiveFloat = 30.0  # for one request
    attempts: Positive = 5  # tries before the sample counts as failed
    outage_s: PositiveFloat = 600.0  # how long samples wait while none can be asked; then their tickets go back
    max_concurrency: Positive = 64
    token_file: str | None = None  # a file that holds the bearer token

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)


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
    max_concurrency: Positive = 64  # requests at the same time to one judge, of one worker
    max_requests_per_s: PositiveFloat | None = None  # to one judge, of one worker
    token_budget: Positive | None = None  # read and written by all judges, for all workers of the run; then an outage
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


SERVICES = (HttpReward, JudgeReward)  # what is asked over HTTP
Reward = Annotated[FunctionReward | HttpReward | JudgeReward | CodeReward, Field(discriminator="type")]


class RewardServer(Section):
    """A reward model that `streamrl up` serves on this machine; http sources with url `local` use it."""

    model: str  # folder or hub name of a sequence-classification model
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port [5555 in NeMo-Aligner]
    max_delay_ms: NonNegativeFloat = 2.0  # how long a request may wait for others to share its batch
    max_batch_tokens: Positive = 16384
    pool: Literal["last", "average"] = "last"  # which tokens' rewards count: the last one's, or the mean of all
    attribute_weights: tuple[float, ...] = ()  # of a model with several outputs: the reward is their weighted sum
    reward_mean: float = 0.0  # standardisation: (r - mean) / std
    reward_std: PositiveFloat = 1.0
