"""What one rank is given to work with, before it knows whether it leads or follows, and whether the run is a replay.

tokenizer and configuration of the model ─► RankContext ─► rank 0 reads the prompts, the others wait ─► the model
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import TokenizerInfo, read_tokenizer_info
from streamrl.learner.metrics.exporters import check_exporters
from streamrl.learner.metrics.record import Timers
from streamrl.learner.model.policy import Policy
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.objective.teacher import check_teacher
from streamrl.learner.objective.trial import try_out
from streamrl.learner.process.job import job_began
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.telemetry.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    config: schema.Config
    world: World
    patient: World  # the same ranks, for waiting while one of them is at the disk
    tokenizer_info: TokenizerInfo
    progress: Progress
    watchdog: Watchdog
    timers: Timers
    stop: threading.Event  # a signal asked us, or another rank, to end
    job_began: float  # on the clock of `time.monotonic`
    elastic: bool = False  # whoever is asked to end leaves, and the other machines go on


def surround(
    config: schema.Config,
    world: World,
    progress: Progress,
    *,
    stop: threading.Event,
    environment: Mapping[str, str],
    elastic: bool = False,
) -> RankContext:
    if world.is_main:  # a mistake of the user shows before anything has an effect
        check_exporters(config)
        try_out(config.algorithm)
    info = read_tokenizer_info(config.model.path)
    if world.is_main:
        check_teacher(config, info)
    return RankContext(
        config=config,
        world=world,
        patient=world.beside(timeout_s=at_disk_s(config)),
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
    """Of a rank that waits for another learner's end, whose ranks have the names that it would have."""
    return Progress(part=f"standby/{socket.gethostname()}-{os.getpid()}", role="learner")


def stall_limit_s(config: schema.Config) -> float:
    """Without a round of the loop for so long a rank ends itself: longer than Redis may be away, twice over."""
    return 60 + 2 * config.redis.give_up_after_s


def at_disk_s(config: schema.Config) -> float:
    """Likewise, while files as large as the model are written or read, which one rank may do while all others wait."""
    return stall_limit_s(config) + config.checkpoint.timeout_s


def read_train_prompts(context: RankContext) -> PromptSet:
    config = context.config
    return PromptSet.load(tokenizer=context.tokenizer_info.tokenizer, data=config.data, seed=config.seed)


def refuse_other_dtypes(config: schema.Config, world: World) -> None:
    """A collective. Each machine settles `dtype: auto` by itself, and all ranks must compute alike."""
    mine = f"model.dtype={config.model.dtype}, weights.dtype={config.weights.dtype}"
    first = world.broadcast(mine.encode() if world.is_main else None).decode()
    if mine != first:
        raise ConfigError(
            f"rank {world.rank} on {socket.gethostname()} has {mine}, rank 0 {first}; all ranks must have the same: "
            "write the dtypes into the configuration in the place of `auto`"
        )


def load_model_together(context: RankContext) -> Policy:
    """A collective; rank 0 reads the prompts before, for as long as it takes."""
    context.patient.barrier()
    refuse_other_dtypes(context.config, context.patient)
    torch.manual_seed(context.config.seed)
    end_ids = context.tokenizer_info.end_ids
    policy = load_policy(context.config, context.world, end_ids, wait_for_readers=context.patient.barrier)
    if context.config.algorithm.routing_replay != "none":
        policy.replay = RoutingReplay(policy.model, context.config, parts=policy.parts)
    return policy
