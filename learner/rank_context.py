"""What a rank works with before it knows whether it leads or follows, and whether the run is live or a replay.

tokenizer and model configuration ─► RankContext ─► rank 0 reads the prompts, the others wait ─► the model
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.groups.prompts import Prompt, PromptSet, read_held_out
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import TokenizerInfo, read_tokenizer_info
from streamrl.learner.metrics.exporters import check_exporters
from streamrl.learner.metrics.record import Timers
from streamrl.learner.model.policy import Policy
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.objective.frozen import check_teacher
from streamrl.learner.objective.trial import try_out
from streamrl.learner.process.job import job_began
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.telemetry.progress import Progress

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    config: schema.Config
    world: World
    patient: World  # the same ranks, with a timeout long enough for one of them to be at the disk
    tokenizer_info: TokenizerInfo
    progress: Progress
    watchdog: Watchdog
    timers: Timers
    stop: threading.Event  # set when a signal told this rank, or another, to end
    job_began: float  # on the clock of `time.monotonic`
    elastic: bool = False  # a machine that is told to end leaves; the others continue


def make_context(
    config: schema.Config,
    world: World,
    progress: Progress,
    *,
    stop: threading.Event,
    environment: Mapping[str, str],
    elastic: bool = False,
) -> RankContext:
    if world.is_main:  # report a user's mistake before anything takes effect
        check_exporters(config)
        try_out(config)
    info = read_tokenizer_info(config.model.path)
    if world.is_main:
        check_teacher(config, info)
    return RankContext(
        config=config,
        world=world,
        patient=world.with_own_group(timeout_s=at_disk_s(config)),
        tokenizer_info=info,
        progress=progress,
        watchdog=Watchdog(limit_s=stall_limit_s(config), at_disk_s=at_disk_s(config)),
        timers=Timers(),
        stop=stop,
        job_began=job_began(environment),
        elastic=elastic,
    )


def rank_progress(world: World) -> Progress:
    return Progress(part=f"learner/{world.rank}", role="learner")


def standby_progress() -> Progress:
    """Progress of a rank that waits for another learner to end; that learner's ranks use the regular names."""
    return Progress(part=f"standby/{socket.gethostname()}-{os.getpid()}", role="learner")


def stall_limit_s(config: schema.Config) -> float:
    """After this long without a round of the loop a rank ends itself: more than twice the allowed Redis outage."""
    return 60 + 2 * config.redis.give_up_after_s


def at_disk_s(config: schema.Config) -> float:
    """The same limit while model-sized files are read or written, which one rank may do while the others wait."""
    return stall_limit_s(config) + config.checkpoint.timeout_s


def read_train_prompts(context: RankContext) -> PromptSet:
    config = context.config
    return PromptSet.load(tokenizer=context.tokenizer_info.tokenizer, data=config.data, seed=config.seed)


def read_held_out_prompts(context: RankContext) -> Sequence[Prompt]:
    return read_held_out(context.config, context.tokenizer_info.tokenizer, notice=log.info)


def refuse_other_dtypes(config: schema.Config, world: World) -> None:
    """Raise if the ranks' dtypes differ: each machine resolves `dtype: auto` by itself. A collective."""
    own = f"model.dtype={config.model.dtype}, weights.dtype={config.weights.dtype}"
    expected = world.broadcast(own.encode() if world.is_main else None).decode()
    if own != expected:
        raise ConfigError(
            f"rank {world.rank} on {socket.gethostname()} has {own}, rank 0 has {expected}; all ranks must have the "
            "same: write the dtypes into the configuration instead of `auto`"
        )


def load_model_together(context: RankContext) -> Policy:
    """Load the model on all ranks; blocks until rank 0 has read the prompts. A collective."""
    context.patient.barrier()
    refuse_other_dtypes(context.config, context.patient)
    torch.manual_seed(context.config.seed)
    end_ids = context.tokenizer_info.end_ids
    policy = load_policy(context.config, context.world, end_ids, wait_for_readers=context.patient.barrier)
    if context.config.algorithm.routing_replay != "none":
        policy.replay = RoutingReplay(policy.model, context.config, split=policy.split)
    return policy
