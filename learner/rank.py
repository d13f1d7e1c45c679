"""One rank at work, from the broadcast Start to the end of the loop.

Start ─► restore ─► barrier ─► loop ─► final state

Shared by a live run (`learner.assemble`) and a replay (`learner.replay`), which bring their own stream, conductor and
publisher.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from streamrl.learner.admission.start import Start
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.save import Saver
from streamrl.learner.checkpoints.shard import Shard, load_state
from streamrl.learner.conductor import Conducting
from streamrl.learner.loop import Loop
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import load_teacher, make_reference
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.publishing.publish import Publishing
from streamrl.learner.rank_context import RankContext
from streamrl.protocol.transport.types import GroupStream, RunState
from streamrl.recipe.algorithms import make_algorithm

_FINISH_S = 1.0  # for a checkpoint still being written when the loop has failed


def work(
    context: RankContext,
    policy: Policy,
    start: Start,
    *,
    conductor: Conducting,
    stream: GroupStream,
    publisher: Publishing,
) -> RunState:
    """Restore, then run the loop. "running": this rank was told to end, and others continue the run."""
    optimizer = make_optimizer(policy, context.config.optimizer)
    gradients = _make_gradients(context, policy)  # before the restore, so that its random draws do not alter the run's
    checkpoints = CheckpointRoot(context.config.folder)
    if start.checkpoint is not None:
        load_state(checkpoints.open(start.checkpoint).folder, policy, optimizer, context.world)
    background = BackgroundThread("checkpoints")
    saver = Saver(
        state=Shard(policy, optimizer, context.world),
        world=context.patient,
        checkpoints=checkpoints,
        conductor=conductor,
        term=start.term,
        background=background,
        timers=context.timers,
    )
    loop = Loop(
        context,
        start=start,
        stream=stream,
        policy=policy,
        optimizer=optimizer,
        gradients=gradients,
        publisher=publisher,
        saver=saver,
        conductor=conductor,
    )
    # These objects live as long as the process; frozen, they are not scanned by every later garbage collection.
    gc.collect()
    gc.freeze()
    if context.world.device.type == "cuda":
        # What passed through the host as it was loaded stays pinned otherwise: twice the size of a frozen base model.
        torch.accelerator.empty_host_cache()
    context.patient.barrier()  # ranks restore at the speed of their own disks
    with context.watchdog.watching(), publisher.working(), background.working(join_s=_FINISH_S):
        state = loop.run()
    context.progress.stopping()
    return _final_state(context, state)


def _final_state(context: RankContext, state: RunState) -> RunState:
    """Return "running" if a machine was told to leave an elastic run. A collective.

    Torchrun ends all ranks when a machine leaves or joins; workers must not take that for the end of the run.
    """
    if state != "stopped" or not context.elastic:
        return state
    any_stopped = context.world.largest(np.array([float(context.stop.is_set())]))
    return "running" if any_stopped[0] else state


def _make_gradients(context: RankContext, policy: Policy) -> Gradients:
    config, world, end_ids = context.config, context.world, context.tokenizer_info.end_ids
    algorithm = make_algorithm(config.algorithm, config.reward_weights)
    needs_reference = algorithm.needs_reference
    return Gradients(
        policy=policy,
        reference=make_reference(config, world, end_ids, policy) if needs_reference else None,
        algorithm=algorithm,
        config=config,
        world=world,
        beat=context.watchdog.beat,
        teacher=load_teacher(config, world, end_ids, wait_for_readers=context.patient.barrier),
    )
