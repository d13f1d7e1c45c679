"""Puts one rank's learner together, in an order such that a user's mistake shows before anything has an effect.

prompts, tokenizer ─► model ─► lease, epoch, claim (rank 0) ─► Start to all ─► restore ─► loop ─► release
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import redis
import torch

from learner.checkpoints.epochs import highest_epoch
from learner.companion import Beside
from learner.conductor import Conductor
from learner.distributed import World
from learner.job import job_began
from learner.lease import LeaseKeeper
from learner.metrics.exporters import check_exporters, open_exporters
from learner.metrics.record import Recorder, Timers
from learner.policy.model import Policy, load_policy, read_speech
from learner.policy.trial import try_out
from learner.publishing.publish import Publisher
from learner.rank import Surroundings, at_disk_s, read_prompts_of, stall_limit_s, work
from learner.rejections import Rejections
from learner.start import Admitted, Start, admit, holder_name, take_lease, was_restarted
from learner.stream.data import PromptSet
from learner.stream.feed import Feed
from learner.suspects import Suspects
from learner.validation import Validation
from learner.watchdog import Watchdog
from streamrl.config import schema
from streamrl.errors import TrainingError, UserError
from streamrl.launch.preflight import check_redis
from streamrl.recipe.algorithms import make_algorithm
from streamrl.telemetry.progress import Progress
from streamrl.transport.connection import connect
from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.reports import ReportWriter
from streamrl.transport.types import RunState
from streamrl.weights.stores import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the run's stream is, and who we are to it."""

    client: redis.Redis
    keys: Keys
    holder: str
    takeover: bool  # replace a learner that holds the run
    is_restart: bool  # this very learner was at it already


def learn(
    *,
    config: schema.Config,
    url: str,
    takeover: bool,
    world: World,
    stop: threading.Event,
    elastic: bool,
    environment: Mapping[str, str],
) -> RunState:
    """The whole life of one rank; "running": others go on with the run."""
    patient = world.beside(timeout_s=at_disk_s(config))
    progress = Progress(part=f"learner/{world.rank}", role="learner")
    with ExitStack() as stack:
        server = _connect(config, url, environment, takeover=takeover)
        stack.enter_context(server.client)
        # Before all that may take long: workers wait for a learner which shows itself.
        stack.enter_context(ReportWriter(server.client, server.keys, progress))
        if world.is_main:
            check_exporters(config)
            try_out(config.algorithm)
        speech = read_speech(config.model.path)
        prompts = read_prompts_of(config, speech) if world.is_main else None
        patient.barrier()  # rank 0 reads them for as long as it takes
        torch.manual_seed(config.seed)
        policy = load_policy(config, world, speech.end_ids)
        around = Surroundings(
            config=config,
            world=world,
            patient=patient,
            speech=speech,
            progress=progress,
            watchdog=Watchdog(limit_s=stall_limit_s(config), at_disk_s=at_disk_s(config)),
            timers=Timers(),
            stop=stop,
            job_began=job_began(environment),
            elastic=elastic,
        )
        if prompts is None:
            return _follow(around, server, policy)
        return _lead(around, server, policy, prompts)


def _connect(config: schema.Config, url: str, environment: Mapping[str, str], *, takeover: bool) -> Server:
    """The server of a run that has begun comes back, after a failover or when it has read its file, and is waited for.
    Before that the address may be wrong."""
    is_restart = was_restarted(environment)
    has_begun = is_restart or highest_epoch(config.folder) > 0
    return Server(
        client=connect(url, config.redis, patience_s=config.redis.give_up_after_s if has_begun else None),
        keys=Keys(config.name),
        holder=holder_name(environment),
        takeover=takeover,
        is_restart=is_restart,
    )


def _follow(around: Surroundings, server: Server, policy: Policy) -> RunState:
    """Every rank but the first."""
    start = Start.from_bytes(around.patient.broadcast_bytes(None))
    publisher = _make_publisher(around, server, policy, start, announcer=None)
    return work(around, policy, start, conductor=None, stream=_make_stream(around, server, start), publisher=publisher)


def _lead(
    around: Surroundings, server: Server, policy: Policy, prompts: tuple[PromptSet, PromptSet | None]
) -> RunState:
    """Rank 0: become the learner of the run, do the work, and say how it ended."""
    check_redis(server.client, around.config)
    take = partial(take_lease, around.config, server.client, server.keys, holder=server.holder)
    take(takeover=server.takeover)
    keeper = LeaseKeeper(take, lease_s=around.config.learner.lease_s)
    with keeper.keeping():
        admitted = admit(
            config=around.config,
            client=server.client,
            keys=server.keys,
            keeper=keeper,
            prompts=prompts[0],
            speech=around.speech,
            holder=server.holder,
            takeover=server.takeover,
            is_restart=server.is_restart,
        )
        try:
            around.patient.broadcast_bytes(admitted.start.to_bytes())
            conductor = _make_conductor(around, admitted, keeper, *prompts)
            start, stream = admitted.start, admitted.stream
            publisher = _make_publisher(around, server, policy, start, announcer=stream)
            state = work(around, policy, start, conductor=conductor, stream=stream, publisher=publisher)
        except (UserError, TrainingError) as error:
            # Nothing that a restart could mend: say so to whoever watches the run.
            admitted.stream.event("failed", error=str(error))
            admitted.stream.release("failed")
            raise
        if state != "running":  # whoever comes next has our name, and needs no release
            admitted.stream.release(state)
    return state


def _make_publisher(
    around: Surroundings, server: Server, policy: Policy, start: Start, *, announcer: LearnerStream | None
) -> Publisher:
    return Publisher(
        policy=policy,
        config=around.config,
        world=around.world,
        run_uid=start.run_uid,
        epoch=start.epoch,
        store=open_store(around.config.weights.store, server.client, server.keys),
        announcer=announcer,
        canary_ids=start.canary_ids,
        beside=Beside("publisher"),
    )


def _make_conductor(
    around: Surroundings,
    admitted: Admitted,
    keeper: LeaseKeeper,
    prompts: PromptSet,
    validation_prompts: PromptSet | None,
) -> Conductor:
    config, start = around.config, admitted.start
    suspects = Suspects(config.folder, epoch=start.epoch)
    feed = Feed(
        stream=admitted.stream,
        prompts=prompts,
        config=config,
        run_uid=start.run_uid,
        fingerprint=around.speech.fingerprint,
        keep=suspects.keep(make_algorithm(config.algorithm).drop_reason),
        narrow=suspects.narrow,
        state=admitted.checkpoint.state.stream if admitted.checkpoint else None,
    )
    if admitted.checkpoint is not None:
        # Once more, in case its writer died before it could tell Redis.
        feed.committed(admitted.checkpoint.state.stream, step=start.step)
    validation = None
    if validation_prompts is not None:
        validation = Validation(
            stream=admitted.stream,
            prompts=validation_prompts,
            settings=config.validation,
            run_uid=start.run_uid,
            epoch=start.epoch,
            fingerprint=around.speech.fingerprint,
            max_attempts=config.worker.max_attempts,
        )
    recorder = Recorder(
        folder=config.folder,
        journal=admitted.stream,
        decoder=around.speech.tokenizer,
        epoch=start.epoch,
        exporters=open_exporters(config, run_uid=start.run_uid),
    )
    return Conductor(
        config=config,
        world_size=around.world.size,
        run_uid=start.run_uid,
        prompts=prompts,
        stream=admitted.stream,
        feed=feed,
        validation=validation,
        checkpoints=admitted.checkpoints,
        lease=keeper,
        recorder=recorder,
        suspects=suspects,
        rejections=Rejections(admitted.stream.reports, give_up_after_s=config.weights.give_up_after_s),
        progress=around.progress,
        timers=around.timers,
        stop=around.stop,
        first_step=start.first_step,
        job_began=around.job_began,
    )


def _make_stream(around: Surroundings, server: Server, start: Start) -> LearnerStream:
    """For the ranks that only read; rank 0's was made when it was admitted."""
    return LearnerStream(
        server.client,
        server.keys,
        run_uid=start.run_uid,
        epoch=start.epoch,
        holder=server.holder,
        lease_s=around.config.learner.lease_s,
        give_up_after_s=around.config.redis.give_up_after_s,
    )
