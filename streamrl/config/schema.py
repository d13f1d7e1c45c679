"""Every setting of a run, with its default and its meaning.

`conf/reinforce.yaml` shows all of them, which a test checks. Unknown keys fail. Names in [brackets] are the names that
users of NeMo-Aligner know.
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
from streamrl.config.reward_settings import OwnRewardServer as OwnRewardServer
from streamrl.config.reward_settings import Reward as Reward
from streamrl.config.reward_settings import RewardServer as RewardServer
from streamrl.config.reward_settings import Tests as Tests
from streamrl.data.dataset import Dataset as Dataset
from streamrl.data.settings import Data as Data
from streamrl.data.settings import NamedDataset as NamedDataset
from streamrl.protocol.transport.keys import RUN_NAME
from streamrl.recipe.names import ENVIRONMENT, source_of
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
    give_up_after_s: PositiveFloat = 120.0  # without a connection for this long, the part ends with an error
    # Of groups delivered and not yet committed, plus those under way: beyond it no more tickets are issued.
    max_backlog_bytes: Positive = 2_000_000_000


class Lora(Section):
    rank: Positive = 32  # [adapter_dim]
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0  # [adapter_dropout]
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # [target_modules: attention_qkv]


class Model(Section):
    path: str  # folder or hub name of a causal language model
    # In forward and backward passes; masters stay fp32. Except float64: everything, to compare runs to the last digit.
    # `auto`, here and in weights, is resolved before (`config.precision`).
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    attention: Literal["auto", "masked", "varlen"] = "auto"  # for packed sequences; auto: varlen for bfloat16 on a GPU
    gradient_checkpointing: Literal["auto"] | bool = "auto"  # auto: on GPUs without room for all activations
    # Where checkpointed layer inputs wait for the backward pass: on the device | in host memory, for samples so long
    # that they fill the device: 2 bytes x width per token, for each layer rounded up to a power of two; copied there
    # and back.
    activations: Literal["device", "cpu"] = "device"
    # Compile decoder layers with torch.compile, which delays the first step. auto: on GPUs, if they can be
    compile: Literal["auto"] | bool = "auto"
    lora: Lora | None = None  # train adapters; the base is the reference
    # Where the frozen reference is kept, if KL needs one: on the device | in host memory, moved to the device layer by
    # layer. With lora there is no copy, and nothing to place.
    reference: Literal["device", "cpu"] = "device"
    # Where fp32 masters, their gradients and AdamW's moments are kept; on the host AdamW's step runs there.
    masters: Literal["device", "cpu"] = "device"
    # For a mixture of experts. Its routers: trained with everything else | frozen. Loss terms over the trained tokens
    # of a step: equal load of all experts; small logits. 0: off
    router: Literal["trained", "frozen"] = "trained"
    router_balance: NonNegativeFloat = 0.0
    router_z: NonNegativeFloat = 0.0


class Sampling(Section):
    num_samples: Positive = 4  # samples per prompt [num_rollouts_per_prompt]
    max_tokens: Positive = 1024  # [length_params.max_length]
    min_tokens: NonNegative = 1  # [length_params.min_length]
    greedy: bool = False  # [sampling_params.use_greedy]; for validation only
    temperature: PositiveFloat = 1.0
    top_k: NonNegative = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: PositiveFloat = 1.0
    stop: tuple[str, ...] = ()  # strings that end a response, in addition to the end token [end_strings]
    # Train although top_k, top_p or repetition_penalty sample from a distribution that the learner does not reproduce.
    accept_mismatch: bool = False


class ValidationSampling(Sampling):
    """Like `sampling`, with its own defaults: changing one setting leaves the others as validation wants them."""

    num_samples: Positive = 1
    greedy: bool = True


class Environment(Section):
    """What answers the model in a multi-turn rollout; its rewards are a source of that name."""

    # A built-in name, a class, or an agent: a function `rollout(session, row)`. The latter two as `package.module:name`
    # or `path/to/file.py:name`. null: a service at `urls`
    target: str | None = None
    urls: tuple[str, ...] = ()  # http://host:port of a service that plays; several are its replicas
    options: DeepArguments = Field(default_factory=dict)  # keyword arguments of the class, or of the function
    weight: float = 1.0  # of its rewards in the sum with those of `rewards`
    max_turns: Positive = 8  # of the model; then the rollout is truncated
    # Per rollout, after its prompt, sampled and given; sampling.max_tokens limits one turn.
    max_tokens: Positive = 1024
    timeout_s: PositiveFloat = 10.0  # for one answer; for an agent: between two requests
    outage_s: PositiveFloat = 600.0  # of a service: how long rollouts wait in an outage; then their tickets go back
    token_file: str | None = None  # of a service: a file that holds the bearer token
    rollout_timeout_s: PositiveFloat = 600.0  # of an agent: for a whole rollout
    memory_mb: Positive = 4096  # per child process
    processes: Positive = 1  # child processes that rollouts are spread over
    network: bool = False  # may open connections, if its worker allows it
    environment: tuple[str, ...] = ()  # variables of its worker that it gets, in addition to PATH, HOME and the like
    tool_parser: str = "hermes"  # for an agent: the form of tool calls in answers; or the name of a vLLM parser
    key_in_url: bool = False  # for an agent that can send no header: put the session's key into the base URL


class Teacher(Section):
    """The model that the policy is pulled to on its own samples, token by token (on-policy distillation). It must have
    the policy's tokenizer."""

    path: str | None = None  # folder or hub name of a causal language model, frozen, on the learner's ranks
    urls: tuple[str, ...] = ()  # instead: http://host:port of vLLM servers of one model, which workers ask
    weight: PositiveFloat = 1.0  # of the reverse KL to it, relative to what rewards teach
    place: Literal["device", "cpu"] = "device"  # with path: as model.reference
    timeout_s: PositiveFloat = 60.0  # with urls: for one request
    attempts: Positive = 5  # with urls: tries before the sample counts as failed
    outage_s: PositiveFloat = 600.0  # with urls: how long samples wait in an outage; then their tickets go back
    max_concurrency: Positive = 32  # with urls: concurrent requests per worker
    token_file: str | None = None  # with urls: a file that holds the bearer token


class Optimizer(Section):
    lr: PositiveFloat = 9e-7
    min_lr: NonNegativeFloat = 9e-8
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    warmup_steps: NonNegative = 10
    constant_steps: NonNegative = 1000  # at the end, at min_lr
    schedule: Literal["cosine", "constant"] = "cosine"  # cosine: falls with the data used up, or with max_steps
    clip_norm: NonNegativeFloat = 1.0  # [gradient_clip_val]; 0: off


class Training(Section):
    groups_per_step: Positive = 16  # the global batch in groups; [model_gbs] is this x num_samples
    max_steps: Annotated[int, Field(ge=-1)] = -1  # -1: until max_epochs; a fork continues its source's count
    max_epochs: Positive = 1
    max_time: str | None = None  # DD:HH:MM:SS for one job; then it checkpoints and stops, for the next job to resume
    micro_batch_tokens: Positive = 16384  # tokens of one forward and backward pass
    max_skipped_in_row: Positive = 5  # non-finite steps before the run stops
    max_failed_in_row: Positive = 32  # groups that workers could not fill, before the run stops


class Lag(Section):
    max_steps: NonNegative = 4  # tickets in flight are bounded by (max_steps + 1) x groups_per_step; 0: on-policy
    # Tokens older than that: trained all the same | no loss | steps wait for them | the whole group is dropped
    stale: Literal["keep", "mask", "wait", "drop"] = "keep"
    hard_limit_steps: Positive = 64  # keep: nothing older than this is trained
    wait_s: PositiveFloat = 300.0  # wait: how long a step waits at most; later groups are dropped


class Weights(Section):
    store: str = "redis:"  # where blobs go: `redis:`, `file:/path`, or a URL for fsspec: `s3://bucket/folder`
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # what is published and served
    publish_every: Positive = 1  # steps
    anchor_every: Positive = 50  # versions between anchors (full copies) at most; or as soon as ...
    anchor_share: PositiveFloat = 0.05  # ... the deltas since the last one exceed this share of its size
    max_store_bytes: Positive = 16_000_000_000  # of blobs in Redis; other stores have no limit here
    share_bytes: NonNegative = 16_000_000_000  # of blobs in a host's shared memory, for all its workers; 0: off
    give_up_after_s: PositiveFloat = 300.0  # a run ends: none was published for so long, or 3/5 of it all rejected one
    # KV cache of older versions when a worker loads a new one: kept for samples in flight only | recomputed for these
    # too | kept, and reused by later samples with the same prompt
    kv_cache: Literal["salt", "clear", "keep"] = "salt"
    prove: bool = True  # before delivering, workers compare the engine's weights with what was published


class Checkpoint(Section):
    every_steps: Positive = 10  # [save_interval]
    keep_last: Positive = 2
    keep_best: NonNegative = 1  # by `best_by` in the validation at their step [save_top_k]
    best_by: str = "val_rollouts/rewards"  # a validation metric for which more is better
    timeout_s: PositiveFloat = 1800.0  # how long ranks wait for one that reads the model or a checkpoint, or writes
    resume: bool = True  # [resume_if_exists]; false: a run folder with checkpoints is an error


class Validation(Section):
    every_steps: NonNegative = 10  # [val_check_interval]; 0: only at start and end, if those are on
    at_start: bool = True
    at_end: bool = True
    max_prompts: Positive = 256  # per dataset
    sampling: ValidationSampling = ValidationSampling()
    pass_by: str | None = None  # the reward source that decides whether a sample passes: pass@k, and the majority
    pass_score: float = 1.0  # the least score that passes
    answer: str | None = None  # a regular expression: its last match, or its group, is a sample's answer: majority
    timeout_s: PositiveFloat = 600.0


class Wandb(Section):
    project: str = "streamrl"
    entity: str | None = None  # null: the account's own
    mode: Literal["online", "offline"] = "online"


class Metrics(Section):
    """Where metrics are written in addition to the run's metrics.jsonl and Redis."""

    tensorboard: bool = False  # event files in the run's folder
    wandb: Wandb | None = None


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise PydanticCustomError("engine", "must be {names}", {"names": " or ".join(map(repr, ENGINES))})
    return name


# GPUs: a number, or as many as are there (`config.placement`).
Gpus = Literal["auto"] | NonNegative


class Worker(Section):
    count: NonNegative = 1  # workers that `streamrl up` starts
    gpus: Gpus = "auto"  # per worker on each host: so many of its own; auto: what engine_args need, shared if too few
    hosts: Positive = 1  # hosts that an engine of vLLM spans; all but the first run `streamrl worker --join`
    engine: Annotated[str, AfterValidator(_known_engine)] = "vllm"  # one of `config.engines`
    max_groups_in_flight: Positive = 32  # counted in samples: finished samples free their slots for other groups
    lease_s: PositiveFloat = 60.0  # a ticket whose worker does not renew it for this long goes to another
    max_attempts: Positive = 3  # reported failures before a ticket goes to the dead letters
    min_survivors: Positive = 2  # deliver a group if at least so many samples have a score
    grace_s: PositiveFloat = 10.0  # on SIGTERM: finish groups for this long, then hand tickets back
    threads: NonNegative = 0  # CPU threads of the engine; 0: the engine's choice
    engine_args: DeepArguments = Field(default_factory=dict)  # passed to vLLM; may contain maps and lists
    start_timeout_s: PositiveFloat = 300.0  # for the engine, and before that for its other hosts to join
    stall_s: PositiveFloat = 120.0  # an engine without a token for this long, while some are due, is restarted


class Layout(Section):
    # FSDP shards the model over the ranks of a replica, and replicas all-reduce their gradients: with one per host,
    # weights are gathered within hosts only. Any run may resume with another layout
    replicas: Positive = 1
    # So many consecutive ranks share each sample: each computes a part of its length, and some of the attention heads
    context: Positive = 1
    # For a mixture: so many consecutive ranks share each layer's experts, and tokens are sent to their experts' ranks
    experts: Positive = 1
    # So many consecutive ranks share each layer: attention heads, and the width of the MLP
    tensor: Positive = 1


class Learner(Section):
    processes: Positive = 1  # ranks that `streamrl up` starts on this machine
    layout: Layout = Layout()  # how they divide the model
    gpus: Gpus = "auto"  # one per rank, shared with no worker; auto: one each if there are any; 0: none
    max_restarts: NonNegative = 20  # of all ranks; an hour without a failure gives all of them back
    threads: NonNegative = 0  # CPU threads of each rank; 0: OMP_NUM_THREADS, else its share of the cores
    lease_s: PositiveFloat = 30.0  # a learner that does not renew its lease for this long may be replaced
    idle_timeout_s: PositiveFloat = 1800.0  # without a group for this long while tickets are out, the run ends


class Config(Section):
    name: Annotated[str, Field(pattern=rf"^{RUN_NAME}$")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234  # fits every generator
    dir: Path = Path("runs")  # the run's folder is dir/name
    redis: Redis = Redis()
    model: Model
    data: Data
    sampling: Sampling = Sampling()
    # Sources by name; the reward is their weighted sum. At least one, unless an environment gives rewards, or only a
    # teacher teaches
    rewards: dict[str, Reward] = Field(default_factory=dict)
    environment: Environment | None = None  # multi-turn rollouts
    reward_server: OwnRewardServer | None = None
    teacher: Teacher | None = None  # null: only rewards teach
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
        return (*self.rewards, *(() if self.environment is None else (ENVIRONMENT,)))

    def may_have_reward(self, name: str) -> bool:
        """Whether samples may have a reward of this name: a source's, or one of those that only an agent knows."""
        has_agent = self.environment is not None and self.environment.target is not None
        is_named = source_of(name) == ENVIRONMENT and name.removeprefix(f"{ENVIRONMENT}.").isidentifier()
        return name in self.reward_sources or (has_agent and is_named)

    @property
    def reward_weights(self) -> dict[str, float]:
        of_environment = {} if self.environment is None else {ENVIRONMENT: self.environment.weight}
        return {name: source.weight for name, source in self.rewards.items()} | of_environment

    @property
    def max_response_tokens(self) -> int:
        """The most tokens of a training sample after its prompt."""
        return self.sampling.max_tokens if self.environment is None else self.environment.max_tokens

    @property
    def folder(self) -> Path:
        return self.dir / self.name
