"""Every setting of a run, with its default and its meaning.

`conf/reinforce.yaml` shows them all, and a test keeps it so. Unknown keys fail. Names in [brackets] are what users of
NeMo-Aligner know a setting by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from streamrl.config.engines import ENGINES
from streamrl.config.reward_settings import SERVICES as SERVICES
from streamrl.config.reward_settings import CodeReward as CodeReward
from streamrl.config.reward_settings import FunctionReward as FunctionReward
from streamrl.config.reward_settings import HttpReward as HttpReward
from streamrl.config.reward_settings import Judge as Judge
from streamrl.config.reward_settings import JudgeReward as JudgeReward
from streamrl.config.reward_settings import Reward as Reward
from streamrl.config.reward_settings import RewardServer as RewardServer
from streamrl.config.reward_settings import Tests as Tests
from streamrl.data.dataset import Dataset as Dataset
from streamrl.data.settings import Data as Data
from streamrl.data.settings import NamedDataset as NamedDataset
from streamrl.recipe.settings import Algorithm as Algorithm
from streamrl.recipe.settings import Kl as Kl
from streamrl.settings import (
    DeepArguments,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class Redis(Section):
    url: str = "embedded"  # redis://, rediss://, unix://, or `embedded`: a private server in the run's folder
    connect_timeout_s: PositiveFloat = 5.0
    reply_timeout_s: PositiveFloat = 15.0  # a reply that takes longer counts as a lost connection
    give_up_after_s: PositiveFloat = 120.0  # without a connection for so long, the part ends with an error
    # Of groups delivered and not yet committed, and of those under way: no more tickets go out beyond it.
    max_backlog_bytes: Positive = 2_000_000_000


class Lora(Section):
    rank: Positive = 32  # [adapter_dim]
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0  # [adapter_dropout]
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # [target_modules: attention_qkv]


class Model(Section):
    path: str  # folder or hub name of a causal language model
    # Of forward and backward passes; masters stay fp32, but for float64: everything, to compare runs to the last digit.
    # `auto`, here and in weights, is settled before (`config.precision`).
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    attention: Literal["auto", "masked", "varlen"] = "auto"  # of packed sequences; auto: varlen for bfloat16 on a GPU
    gradient_checkpointing: Literal["auto"] | bool = "auto"  # auto: on GPUs, for a model that can
    # Where the inputs of layers, all that it keeps, wait for the backward pass: on the device | in the host's memory,
    # for samples so long that they fill the device: 2 bytes x width a token and layer, copied there and back.
    activations: Literal["device", "cpu"] = "device"
    compile: bool = False  # decoder layers, by torch.compile: the first step waits for it
    lora: Lora | None = None  # train adapters; the base is the reference
    # Where the frozen reference waits, while KL needs one: on the device | in the host's memory, passing through the
    # device layer by layer. With lora there is no copy, and nothing to place.
    reference: Literal["device", "cpu"] = "device"
    # Where fp32 masters, their gradients and AdamW's moments wait, likewise; on the host AdamW makes its step there.
    masters: Literal["device", "cpu"] = "device"
    # Of a mixture of experts. What chooses them: trained with all else | as it was. Terms of the loss, over the trained
    # tokens of a step: that all experts get as many; that logits stay small. 0: off
    router: Literal["trained", "frozen"] = "trained"
    router_balance: NonNegativeFloat = 0.0
    router_z: NonNegativeFloat = 0.0


class Sampling(Section):
    num_samples: Positive = 4  # samples a prompt [num_rollouts_per_prompt]
    max_tokens: Positive = 1024  # [length_params.max_length]
    min_tokens: NonNegative = 1  # [length_params.min_length]
    greedy: bool = False  # [sampling_params.use_greedy]; for validation only
    temperature: PositiveFloat = 1.0
    top_k: NonNegative = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: PositiveFloat = 1.0
    stop: tuple[str, ...] = ()  # strings that end a response, beside the end token [end_strings]
    # Train although top_k, top_p or repetition_penalty sample from a distribution the learner does not reproduce.
    accept_mismatch: bool = False


class ValidationSampling(Sampling):
    """As `sampling`, with defaults of its own: one setting changed leaves the others as validation wants them."""

    num_samples: Positive = 1
    greedy: bool = True


class Environment(Section):
    """What answers the model in a rollout of several turns; its rewards are a source of that name."""

    # A built-in name, a class, or an agent: a function `rollout(session, row)`. The latter two as `package.module:name`
    # or `path/to/file.py:name`. null: a service at `urls`
    target: str | None = None
    urls: tuple[str, ...] = ()  # http://host:port of a service that plays; several are replicas of it
    options: DeepArguments = Field(default_factory=dict)  # keyword arguments of the class, or of the function
    weight: float = 1.0  # of its rewards beside those of `rewards`
    max_turns: Positive = 8  # of the model; then the rollout is cut off
    # Of a rollout beyond its prompt, sampled and given; sampling.max_tokens is that of a turn.
    max_tokens: Positive = 1024
    timeout_s: PositiveFloat = 10.0  # for one answer; of an agent: between two requests
    outage_s: PositiveFloat = 600.0  # of a service: how long rollouts wait while it is out; then their tickets go back
    token_file: str | None = None  # of a service: a file that holds the bearer token
    rollout_timeout_s: PositiveFloat = 600.0  # of an agent: for a whole rollout
    memory_mb: Positive = 4096  # of one child process
    processes: Positive = 1  # child processes that rollouts are spread over
    network: bool = False  # it may open connections, where its worker allows it
    environment: tuple[str, ...] = ()  # variables that it gets of its worker's, beside PATH, HOME and their like
    tool_parser: str = "hermes"  # of an agent: how calls of tools stand in answers; or a parser of vLLM's by its name
    key_in_url: bool = False  # of an agent: its session's key stands in the base URL, for one that can send no header


class Teacher(Section):
    """Whom the policy is drawn to on its own samples, token by token: on-policy distillation. It has the policy's
    tokenizer."""

    path: str | None = None  # folder or hub name of a causal language model, frozen, on the learner's ranks
    urls: tuple[str, ...] = ()  # instead: http://host:port of vLLM servers of one model, which workers ask
    weight: PositiveFloat = 1.0  # of reverse KL to it, beside what rewards teach
    place: Literal["device", "cpu"] = "device"  # of a path: as model.reference
    timeout_s: PositiveFloat = 60.0  # of urls: for one request
    attempts: Positive = 5  # of urls: tries before the sample counts as failed
    outage_s: PositiveFloat = (
        600.0  # of urls: how long samples wait while none can be asked; then their tickets go back
    )
    max_concurrency: Positive = 32  # of urls: requests at the same time, of one worker
    token_file: str | None = None  # of urls: a file that holds the bearer token


class Optimizer(Section):
    lr: PositiveFloat = 9e-7
    min_lr: NonNegativeFloat = 9e-8
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    warmup_steps: NonNegative = 10
    constant_steps: NonNegative = 1000  # at the end, at min_lr
    schedule: Literal["cosine", "constant"] = "cosine"
    clip_norm: NonNegativeFloat = 1.0  # [gradient_clip_val]; 0: off


class Training(Section):
    groups_per_step: Positive = 16  # the global batch in groups; [model_gbs] is this x num_samples
    max_steps: Annotated[int, Field(ge=-1)] = -1  # -1: until max_epochs; a fork counts on from its source's
    max_epochs: Positive = 1
    max_time: str | None = None  # DD:HH:MM:SS for one job; then it checkpoints and stops, and the next one goes on
    micro_batch_tokens: Positive = 16384  # tokens of one forward and backward pass
    max_skipped_in_row: Positive = 5  # non-finite steps before the run stops
    max_failed_in_row: Positive = 32  # groups that workers could not fill, before the run stops


class Lag(Section):
    max_steps: NonNegative = 4  # tickets in flight are bounded by (max_steps + 1) x groups_per_step; 0: on-policy
    # Tokens older than that: trained all the same | no loss | no step before they are in | the whole group dropped
    stale: Literal["keep", "mask", "wait", "drop"] = "keep"
    hard_limit_steps: Positive = 64  # keep: nothing older than this is trained
    wait_s: PositiveFloat = 300.0  # wait: a step waits at most so long; what comes later is dropped


class Weights(Section):
    store: str = "redis:"  # where blobs go: `redis:`, `file:/path`, or what fsspec knows: `s3://bucket/folder`
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # what is published and served
    publish_every: Positive = 1  # steps
    anchor_every: Positive = 50  # versions between anchors (full copies) at most; or as soon as ...
    anchor_share: PositiveFloat = 0.05  # ... the deltas since the last one weigh more than this share of it
    max_store_bytes: Positive = 16_000_000_000  # of blobs in Redis; other stores are as large as they are
    share_bytes: NonNegative = 16_000_000_000  # in a host's shared memory, of blobs for all its workers; 0: none
    give_up_after_s: PositiveFloat = 300.0  # no version gets out, or (3/5 of it) all workers reject it: the run ends
    # Keys and values of older versions, when a worker loads a new one: kept by samples under way alone | computed anew
    # by these too | kept, and read by later samples with the same prompt
    kv_cache: Literal["salt", "clear", "keep"] = "salt"
    prove: bool = True  # workers hold what their engine computes with against what was published, before they deliver


class Checkpoint(Section):
    every_steps: Positive = 10  # [save_interval]
    keep_last: Positive = 2
    keep_best: NonNegative = 1  # by `best_by` of the validation at their step [save_top_k]
    best_by: str = "val_rollouts/rewards"  # a metric of validation, of which more is better
    timeout_s: PositiveFloat = 1800.0  # all ranks wait so long for one that reads the model or a checkpoint, or writes
    resume: bool = True  # [resume_if_exists]; false: a run folder with checkpoints is an error


class Validation(Section):
    every_steps: NonNegative = 10  # [val_check_interval]; 0: only at start and end where those are on
    at_start: bool = True
    at_end: bool = True
    max_prompts: Positive = 256  # of each dataset
    sampling: ValidationSampling = ValidationSampling()
    pass_by: str | None = None  # the reward source by which a sample passes: pass@k, and the majority
    pass_score: float = 1.0  # it gives at least so much
    answer: str | None = None  # a regular expression: its last match, the group in it, is a sample's answer: majority
    timeout_s: PositiveFloat = 600.0


class Wandb(Section):
    project: str = "streamrl"
    entity: str | None = None  # null: the account's own
    mode: Literal["online", "offline"] = "online"


class Metrics(Section):
    """Where metrics go beside the run's metrics.jsonl and Redis."""

    tensorboard: bool = False  # event files in the run's folder
    wandb: Wandb | None = None


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise PydanticCustomError("engine", "must be {names}", {"names": " or ".join(map(repr, ENGINES))})
    return name


# GPUs: a number, or what there is of them (`config.placement`).
Gpus = Literal["auto"] | NonNegative


class Worker(Section):
    count: NonNegative = 1  # workers that `streamrl up` starts
    gpus: Gpus = "auto"  # of each worker: as many, shared with nobody; auto: as engine_args want, shared where few
    engine: Annotated[str, AfterValidator(_known_engine)] = "vllm"  # one of `config.engines`
    max_groups_in_flight: Positive = 32  # so many groups' samples; those that are done leave their places to others
    lease_s: PositiveFloat = 60.0  # a ticket whose worker shows no life for so long goes to another
    max_attempts: Positive = 3  # reported failures before a ticket goes to the dead letters
    min_survivors: Positive = 2  # deliver a group when at least so many samples have a score
    grace_s: PositiveFloat = 10.0  # on SIGTERM: finish groups for so long, then hand tickets back
    threads: NonNegative = 0  # CPU threads of the engine; 0: the engine's choice
    engine_args: DeepArguments = Field(default_factory=dict)  # passed on to vLLM; maps and lists too
    start_timeout_s: PositiveFloat = 300.0
    stall_s: PositiveFloat = 120.0  # an engine that makes no token for so long while it should is started anew


class Layout(Section):
    # FSDP shards the model over the ranks of a replica, and replicas add up their gradients: with as many as there are
    # hosts, weights are gathered within a host alone. Any run may go on with another layout
    replicas: Positive = 1
    # So many ranks in a row share each sample: a part of its length is computed on each, and in attention of the heads
    context: Positive = 1
    # Of a mixture: so many ranks that follow each other share each layer's experts, and tokens go to who holds theirs
    experts: Positive = 1
    # So many ranks that follow each other share each layer: heads of attention, and the width of the MLP
    tensor: Positive = 1


class Learner(Section):
    processes: Positive = 1  # ranks that `streamrl up` starts on this machine
    layout: Layout = Layout()  # how they divide the model
    gpus: Gpus = "auto"  # for these ranks: one each, shared with no worker; auto: one each where there are any; 0: none
    max_restarts: NonNegative = 20
    threads: NonNegative = 0  # CPU threads of each rank; 0: torch's choice
    lease_s: PositiveFloat = 30.0  # a learner without sign of life for so long may be replaced
    idle_timeout_s: PositiveFloat = 1800.0  # no group for so long ends the run with an error


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234  # no more bits than every generator takes
    dir: Path = Path("runs")  # the run's folder is dir/name
    redis: Redis = Redis()
    model: Model
    data: Data
    sampling: Sampling = Sampling()
    # Sources by name; the reward is their weighted sum. At least one, but where an environment gives rewards, or a
    # teacher teaches alone
    rewards: dict[str, Reward] = Field(default_factory=dict)
    environment: Environment | None = None  # rollouts of several turns
    reward_server: RewardServer | None = None
    teacher: Teacher | None = None  # null: rewards alone teach
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    lag: Lag = Lag()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    worker: Worker = Worker()
    learner: Learner = Learner()

    @property
    def reward_sources(self) -> tuple[str, ...]:
        return (*self.rewards, *(() if self.environment is None else ("environment",)))

    @property
    def reward_weights(self) -> dict[str, float]:
        of_environment = {} if self.environment is None else {"environment": self.environment.weight}
        return {name: source.weight for name, source in self.rewards.items()} | of_environment

    @property
    def max_response_tokens(self) -> int:
        """Of a training sample, beyond its prompt."""
        return self.sampling.max_tokens if self.environment is None else self.environment.max_tokens

    @property
    def folder(self) -> Path:
        return self.dir / self.name
