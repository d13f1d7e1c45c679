"""One rank at work: what it was given, and its way from the Start that all were told to the end of the loop.

Start ─► restore ─► all are there ─► loop ─► how it ended

The same for a live run (`learner.assemble`) and for a replay (`learner.replay`), which bring their own stream,
conductor and publisher.
"""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass

import numpy as np

from learner.checkpoints.checkpoint import CheckpointRoot
from learner.checkpoints.epochs import CheckpointName
from learner.checkpoints.save import Saver
from learner.checkpoints.state import load_state
from learner.conductor import Conductor
from learner.distributed import World
from learner.loop import Loop, Parts
from learner.metrics.record import Timers
from learner.policy.gradients import Gradients
from learner.policy.model import Policy, Speech
from learner.policy.optim import make_optimizer
from learner.policy.reference import make_reference
from learner.publishing.publish import Publisher
from learner.replayed import Unpublished
from learner.start import Start
from learner.stream.data import PromptSet
from learner.watchdog import Watchdog
from streamrl.config import schema
from streamrl.recipe.algorithms import make_algorithm
from streamrl.telemetry.progress import Progress
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What this rank was given to work with."""

    config: schema.Config
    world: World
    patient: World  # the same ranks, for waiting while one of them is at the disk
    speech: Speech
    progress: Progress
    watchdog: Watchdog
    timers: Timers
    stop: threading.Event  # a signal asked us, or another rank, to end
    job_began: float  # on the clock of `time.monotonic`
    elastic: bool = False  # whoever is asked to end leaves, and the other machines go on


def stall_limit_s(config: schema.Config) -> float:
    """Without a round of the loop for so long a rank ends itself: longer than Redis may be away, twice over."""
    return 60 + 2 * config.redis.give_up_after_s


def at_disk_s(config: schema.Config) -> float:
    """Likewise, while files as large as the model are written or read, which one rank may do while all others wait."""
    return stall_limit_s(config) + config.checkpoint.timeout_s


def read_prompts_of(config: schema.Config, speech: Speech) -> tuple[PromptSet, PromptSet | None]:
    data, seed, validation = config.data, config.seed, config.data.validation
    train = PromptSet.load_train(tokenizer=speech.tokenizer, data=data, seed=seed)
    if validation is None:
        return train, None
    key = "data.validation"
    return train, PromptSet.load(validation, tokenizer=speech.tokenizer, data=data, seed=seed, key=key)


def work(
    around: Surroundings,
    policy: Policy,
    start: Start,
    *,
    conductor: Conductor | None,
    stream: GroupStream,
    publisher: Publisher | Unpublished,
) -> RunState:
    """Every rank: restore, then the loop. "running": this rank is told to end, and others go on with the run."""
    optimizer = make_optimizer(policy, around.config.optimizer)
    checkpoints = CheckpointRoot(around.config.folder)
    if start.checkpoint is not None:
        name = CheckpointName.parse(start.checkpoint)
        assert name is not None, f"{start.checkpoint} is a checkpoint's name"
        load_state(checkpoints.open(name).folder, policy, optimizer, around.world)
    loop = Loop(
        Parts(
            config=around.config,
            world=around.world,
            patient=around.patient,
            start=start,
            stream=stream,
            policy=policy,
            optimizer=optimizer,
            gradients=_make_gradients(around, policy),
            publisher=publisher,
            saver=Saver(
                policy=policy,
                optimizer=optimizer,
                world=around.patient,
                checkpoints=checkpoints,
                conductor=conductor,
                epoch=start.epoch,
            ),
            conductor=conductor,
            speech=around.speech,
            progress=around.progress,
            timers=around.timers,
            watchdog=around.watchdog,
            stop=around.stop,
        )
    )
    # What is here stays. The collector would look through all of it again after every few thousand groups.
    gc.collect()
    gc.freeze()
    around.patient.barrier()  # each restores at the pace of its own disk
    with around.watchdog.watching(), publisher.working():
        state = loop.run()
    around.progress.stopping()
    return _go_on(around, state)


def _go_on(around: Surroundings, state: RunState) -> RunState:
    """A collective. The run itself was not stopped when a machine was told to leave, or when another one comes, for
    which torchrun ends all ranks as well: workers must not take it for the end."""
    if state != "stopped" or not around.elastic:
        return state
    told = around.world.largest(np.array([float(around.stop.is_set())]))
    return "running" if told[0] else state


def _make_gradients(around: Surroundings, policy: Policy) -> Gradients:
    config, world = around.config, around.world
    algorithm = make_algorithm(config.algorithm)
    asked = algorithm.needs_reference
    return Gradients(
        policy=policy,
        reference=make_reference(config, world, around.speech.end_ids, policy) if asked else None,
        algorithm=algorithm,
        config=config,
        world=world,
        beat=around.watchdog.beat,
    )
