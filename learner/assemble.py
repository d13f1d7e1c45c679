"""Puts one rank's learner together, in an order such that a user's mistake shows before anything has an effect.

prompts, tokenizer ─► model ─► lease, epoch, claim (rank 0) ─► Start to all ─► restore ─► loop ─► release
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from learner.checkpoints.epochs import highest_epoch
from learner.companion import Beside
from learner.conductor import Conductor
from learner.distributed import World
from learner.following import Follower
from learner.lease import LeaseKeeper
from learner.metrics.exporters import check_exporters
from learner.policy.policy import Policy
from learner.policy.trial import try_out
from learner.publishing.publish import Publisher
from learner.rank import work
from learner.start import Admitted, Server, Start, admit, holder_name, take_lease, was_restarted
from learner.stream.data import PromptSet
from learner.stream.feed import Feed
from learner.surroundings import Surroundings, load_model_together, rank_progress, read_train_prompts, surround
from learner.suspects import Suspects
from learner.validation import Validation
from streamrl.config import schema
from streamrl.errors import TrainingError, UserError
from streamrl.recipe.algorithms import make_algorithm
from streamrl.transport.connection import check_server, connect
from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.reports import ReportWriter
from streamrl.transport.types import RunState
from streamrl.weights.stores import budget_in_redis, open_store


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
    progress = rank_progress(world)
    with ExitStack() as stack:
        server = _connect(config, url, environment, takeover=takeover)
        stack.enter_context(server.client)
        # Before all that may take long: workers wait for a learner which shows itself.
        stack.enter_context(ReportWriter(server.client, server.keys, progress))
        if world.is_main:
            check_exporters(config)
            try_out(config.algorithm)
        around = surround(config, world, progress, stop=stop, environment=environment, elastic=elastic)
        return _lead(around, server) if world.is_main else _follow(around, server)


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


def _follow(around: Surroundings, server: Server) -> RunState:
    """Every rank but the first."""
    policy = load_model_together(around)
    start = Start.from_bytes(around.patient.broadcast(None))
    stream = server.stream(around.config, run_uid=start.run_uid, epoch=start.epoch)
    publisher = _make_publisher(around, server, policy, start, stream)
    return work(around, policy, start, conductor=Follower(around), stream=stream, publisher=publisher)


def _lead(around: Surroundings, server: Server) -> RunState:
    """Rank 0: become the learner of the run, do the work, and say how it ended."""
    config, prompts = around.config, read_train_prompts(around)
    validation_prompts = _read_validation_prompts(around)
    policy = load_model_together(around)
    check_server(
        server.client, max_backlog_bytes=config.redis.max_backlog_bytes, max_store_bytes=budget_in_redis(config.weights)
    )
    take = partial(take_lease, config, server)
    take(takeover=server.takeover)
    keeper = LeaseKeeper(take, lease_s=config.learner.lease_s)
    with keeper.keeping():
        admitted = admit(
            config=config, server=server, keeper=keeper, prompts=prompts, fingerprint=around.speech.fingerprint
        )
        start, stream = admitted.start, admitted.stream
        try:
            around.patient.broadcast(start.to_bytes())
            conductor = _make_conductor(around, admitted, keeper, prompts, validation_prompts)
            publisher = _make_publisher(around, server, policy, start, stream)
            state = work(around, policy, start, conductor=conductor, stream=stream, publisher=publisher)
        except (UserError, TrainingError) as error:
            # Nothing that a restart could mend: say so to whoever watches the run.
            stream.event("failed", error=str(error))
            stream.release("failed")
            raise
        if state != "running":  # whoever comes next has our name, and needs no release
            stream.release(state)
    return state


def _read_validation_prompts(around: Surroundings) -> PromptSet | None:
    config, path = around.config, around.config.data.validation
    if path is None:
        return None
    tokenizer = around.speech.tokenizer
    return PromptSet.load(path, tokenizer=tokenizer, data=config.data, seed=config.seed, key="data.validation")


def _make_publisher(
    around: Surroundings, server: Server, policy: Policy, start: Start, stream: LearnerStream
) -> Publisher:
    return Publisher(
        policy=policy,
        config=around.config,
        world=around.world,
        run_uid=start.run_uid,
        epoch=start.epoch,
        store=open_store(around.config.weights.store, server.client, server.keys),
        announcer=stream,
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
    return Conductor(
        around,
        start,
        prompts=prompts,
        stream=admitted.stream,
        feed=feed,
        suspects=suspects,
        validation=validation,
        lease=keeper,
    )
