"""Settings of reward sources and of the run's own reward server: a part of `config.schema`, which re-exports them."""

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
    of_group: bool = False  # called with all samples of a prompt at once, in TRL's form
    per_token: bool = False  # returns a number for each token; the reward is their sum
    weight: float = 1.0
    max_abs: PositiveFloat = 1e6  # a larger score is an error: the sample counts as failed
    timeout_s: PositiveFloat = 10.0
    memory_mb: Positive = 4096  # per child process; beyond it the function gets a MemoryError
    options: Arguments = Field(default_factory=dict)  # keyword arguments of the function
    processes: Positive = 1  # child processes that run it in parallel
    network: bool = False  # may open connections, if its worker allows it
    environment: tuple[str, ...] = ()  # variables of its worker that it gets, in addition to PATH, HOME and the like


class Tests(Section):
    """How a program is tested."""

    field: str = "tests"  # in the row: [{input, output}, ...], {inputs: [...], outputs: [...]}, or code, one or a list
    partial: bool = False  # the score is the share of tests that pass; false: 1 where all do, else 0
    time_s: PositiveFloat = 5.0  # per test, computing and waiting, but not waiting for a CPU
    memory_mb: Positive = 512  # per test


class CodeReward(Section):
    """The program in a completion, run against its row's tests in a sandbox of the worker."""

    type: Literal["code"]
    tests: Tests = Tests()
    weight: float = 1.0
    timeout_s: PositiveFloat = 60.0  # a program without its CPU time by then is not scored 0: its sample fails
    processes: Positive = 2  # programs that run in parallel

    @property
    def max_abs(self) -> float:
        return 1.0

    @property
    def environment(self) -> tuple[str, ...]:
        return ()

    @property
    def of_group(self) -> bool:
        return False


class HttpReward(Section):
    type: Literal["http"]
    url: str  # of a reward service: http://host:port
    replicas: tuple[str, ...] = ()  # further addresses of the same service
    # The form of its requests
    form: Literal["streamrl", "openrlhf", "vllm-classify", "vllm-pooling", "sandbox-fusion"] = "streamrl"
    tests: Tests = Tests()  # for form sandbox-fusion
    weight: float = 1.0
    max_abs: PositiveFloat = 1e6  # a larger score is an error: the sample counts as failed
    timeout_s: PositiveFloat = 30.0  # for one request
    attempts: Positive = 5  # tries before the sample counts as failed
    outage_s: PositiveFloat = 600.0  # how long samples wait in an outage; then their tickets go back
    max_concurrency: Positive = 64
    token_file: str | None = None  # a file that holds the bearer token

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)

    @property
    def of_group(self) -> bool:
        return False


class Judge(Section):
    """A model behind an OpenAI-compatible URL."""

    url: str  # the base URL for clients: https://host/v1
    model: str
    replicas: tuple[str, ...] = ()  # further addresses of the same model
    token_file: str | None = None  # a file that holds the key, or ...
    token_env: str | None = None  # ... a variable of the worker's environment, if the worker allows it
    options: DeepArguments = Field(default_factory=dict)  # further fields of each request; null removes one of ours

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)


class JudgeReward(Section):
    """Judge models that grade an answer; their verdicts are scaled to 0 to 1."""

    type: Literal["judge"]
    judges: dict[str, Judge]  # by names of yours; all of them are asked
    rubric: str  # what a good answer is, in words
    form: Literal["pointwise", "pairwise"] = "pointwise"  # each on its own | which of two is better, in both orders
    scale: tuple[int, int] = (1, 10)  # pointwise: worst and best
    against: str | None = None  # pairwise: the row's field with the other answer; null: others of the group
    opponents: Positive = 2  # in the group: neighbours on each side to compare with
    show: tuple[str, ...] = ()  # fields of the row that judges see, such as a reference answer
    combine: Literal["mean", "majority"] = "mean"  # of several judges
    structured: bool = True  # request the answer's JSON schema; false: for services without support
    explain: bool = False  # the judge writes its reasons before its verdict
    temperature: NonNegativeFloat = 0.0
    max_tokens: Positive = 512  # of a judge's answer
    weight: float = 1.0
    timeout_s: PositiveFloat = 60.0  # for one request
    attempts: Positive = 5  # tries before the sample counts as failed
    outage_s: PositiveFloat = 600.0  # how long samples wait in an outage; then their tickets go back
    max_concurrency: Positive = 64  # concurrent requests to one judge, per worker
    max_requests_per_s: PositiveFloat | None = None  # to one judge, per worker
    token_budget: Positive | None = None  # read and written by all judges, over all workers of the run; then an outage
    cache_size: NonNegative = 10_000  # cached verdicts per judge, so that a question is asked once; 0: off

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url for judge in self.judges.values() for url in judge.urls)

    @property
    def max_abs(self) -> float:
        return 1.0

    @property
    def of_group(self) -> bool:
        return self.form == "pairwise" and self.against is None


SERVICES = (HttpReward, JudgeReward)  # sources behind HTTP
Reward = Annotated[FunctionReward | HttpReward | JudgeReward | CodeReward, Field(discriminator="type")]


class RewardServer(Section):
    """A reward model and how it is served: the options of `streamrl reward serve`."""

    model: str  # folder or hub name of a sequence-classification model
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port [5555 in NeMo-Aligner]
    max_delay_ms: NonNegativeFloat = 2.0  # how long a request may wait for others to share its batch
    max_batch_tokens: Positive = 16384
    pool: Literal["last", "average"] = "last"  # which tokens' rewards count: the last one's, or the mean of all
    attribute_weights: tuple[float, ...] = ()  # for a model with several outputs: the reward is their weighted sum
    reward_mean: float = 0.0  # standardisation: (r - mean) / std
    reward_std: PositiveFloat = 1.0


class OwnRewardServer(RewardServer):
    """The one that `streamrl up` starts on this machine; http sources with url `local` use it."""

    start_timeout_s: PositiveFloat = 600.0  # for loading the model; a large one on a slow disk takes long
