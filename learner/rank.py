"""One rank at work: its way from the Start that all were told to the end of the loop.

Start ─► restore ─► all are there ─► loop ─► how it ended

The same for a live run (`learner.assemble`) and for a replay (`learner.replay`), which bring their own stream,
conductor and publisher.
"""

from __future__ import annotations

import gc

import numpy as np

from learner.checkpoints.checkpoint import CheckpointRoot
from learner.checkpoints.epochs import CheckpointName
from learner.checkpoints.save import Saver
from learner.checkpoints.state import load_state
from learner.following import Conducting
from learner.loop import Loop, Parts
from learner.policy.gradients import Gradients
from learner.policy.optim import make_optimizer
from learner.policy.policy import Policy
from learner.policy.reference import make_reference
from learner.publishing.publish import Publishing
from learner.start import Start
from learner.surroundings import Surroundings
from streamrl.recipe.algorithms import make_algorithm
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import RunState


def work(
    around: Surroundings,
    policy: Policy,
    start: Start,
    *,
    conductor: Conducting,
    stream: GroupStream,
    publisher: Publishing,
) -> RunState:
    """Every rank: restore, then the loop. "running": this rank is told to end, and others go on with the run."""
    optimizer = make_optimizer(policy, around.config.optimizer)
    checkpoints = CheckpointRoot(around.config.folder)
    if start.checkpoint is not None:
        name = CheckpointName.parse(start.checkpoint)
        assert name is not None, f"{start.checkpoint} is a checkpoint's name"
        load_state(checkpoints.open(name).folder, policy, optimizer, around.world)
    saver = Saver(
        policy=policy,
        optimizer=optimizer,
        world=around.patient,
        checkpoints=checkpoints,
        conductor=conductor,
        epoch=start.epoch,
    )
    parts = Parts(
        start=start,
        stream=stream,
        policy=policy,
        optimizer=optimizer,
        gradients=_make_gradients(around, policy),
        publisher=publisher,
        saver=saver,
        conductor=conductor,
    )
    loop = Loop(around, parts)
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
