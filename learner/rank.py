"""One rank at work: its way from the Start that all were told to the end of the loop.

Start ─► restore ─► all are there ─► loop ─► how it ended

The same for a live run (`learner.assemble`) and for a replay (`learner.replay`), which bring their own stream,
conductor and publisher.
"""

from __future__ import annotations

import gc

import numpy as np

from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.save import Saver
from streamrl.learner.checkpoints.shard import Shard, load_state
from streamrl.learner.conductor import Conducting
from streamrl.learner.loop import Loop, Parts
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer
from streamrl.learner.objective.reference import make_reference
from streamrl.learner.objective.teacher import load_teacher
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.publishing.publish import Publishing
from streamrl.learner.rank_context import RankContext
from streamrl.learner.start import Start
from streamrl.protocol.transport.types import GroupStream, RunState
from streamrl.recipe.algorithms import make_algorithm

_LAST_S = 1.0  # for a checkpoint that nobody waits for any more, since the loop has failed


def work(
    context: RankContext,
    policy: Policy,
    start: Start,
    *,
    conductor: Conducting,
    stream: GroupStream,
    publisher: Publishing,
) -> RunState:
    """Every rank: restore, then the loop. "running": this rank is told to end, and others go on with the run."""
    optimizer = make_optimizer(policy, context.config.optimizer)
    gradients = _make_gradients(context, policy)  # before the restore: random numbers that it draws are not the run's
    checkpoints = CheckpointRoot(context.config.folder)
    if start.checkpoint is not None:
        load_state(checkpoints.open(start.checkpoint).folder, policy, optimizer, context.world)
    beside = BackgroundThread("checkpoints")
    saver = Saver(
        state=Shard(policy, optimizer, context.world),
        world=context.patient,
        checkpoints=checkpoints,
        conductor=conductor,
        term=start.term,
        beside=beside,
        timers=context.timers,
    )
    parts = Parts(
        start=start,
        stream=stream,
        policy=policy,
        optimizer=optimizer,
        gradients=gradients,
        publisher=publisher,
        saver=saver,
        conductor=conductor,
    )
    loop = Loop(context, parts)
    # What is here stays. The collector would look through all of it again after every few thousand groups.
    gc.collect()
    gc.freeze()
    context.patient.barrier()  # each restores at the pace of its own disk
    with context.watchdog.watching(), publisher.working(), beside.working(join_s=_LAST_S):
        state = loop.run()
    context.progress.stopping()
    return _go_on(context, state)


def _go_on(context: RankContext, state: RunState) -> RunState:
    """A collective. The run itself was not stopped when a machine was told to leave, or when another one comes, for
    which torchrun ends all ranks as well: workers must not take it for the end."""
    if state != "stopped" or not context.elastic:
        return state
    told = context.world.largest(np.array([float(context.stop.is_set())]))
    return "running" if told[0] else state


def _make_gradients(context: RankContext, policy: Policy) -> Gradients:
    config, world, end_ids = context.config, context.world, context.tokenizer_info.end_ids
    algorithm = make_algorithm(config.algorithm, config.reward_weights)
    asked = algorithm.needs_reference
    return Gradients(
        policy=policy,
        reference=make_reference(config, world, end_ids, policy) if asked else None,
        algorithm=algorithm,
        config=config,
        world=world,
        beat=context.watchdog.beat,
        teacher=load_teacher(config, world, end_ids, wait_for_readers=context.patient.barrier),
    )
