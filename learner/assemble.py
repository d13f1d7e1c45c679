"""Assembles one rank's learner, in an order that reports a user's mistake before anything takes effect.

prompts, tokenizer ─► model ─► lease, term, claim (rank 0) ─► Start to all ─► restore ─► loop ─► release
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from streamrl.config import schema
from streamrl.errors import TrainingError, UserError
from streamrl.learner.admission.admit import Admitted, admit
from streamrl.learner.admission.server import Server, holder_name, holding_lease, take_lease, was_restarted
from streamrl.learner.admission.start import Start
from streamrl.learner.checkpoints.terms import highest_term
from streamrl.learner.conductor import Conductor, Follower
from streamrl.learner.groups.backlog import largest_group
from streamrl.learner.groups.curriculum import open_order
from streamrl.learner.groups.feed import Feed
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.learner.metrics.keepsakes import note_state
from streamrl.learner.model.policy import Policy
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.process.failing import heeding_peers
from streamrl.learner.process.job import job_began
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.learner.process.ranks import World
from streamrl.learner.process.stop_flag import share_signals
from streamrl.learner.publishing.publish import Publisher
from streamrl.learner.rank import work
from streamrl.learner.rank_context import (
    RankContext,
    load_model_together,
    make_context,
    rank_progress,
    read_held_out_prompts,
    read_train_prompts,
    standby_progress,
)
from streamrl.learner.validation.validation import Validation
from streamrl.protocol.transport.connection import check_server, connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import lease_holder
from streamrl.protocol.transport.reports import write_reports
from streamrl.protocol.transport.types import RunState
from streamrl.protocol.weights.stores import budget_in_redis, open_store
from streamrl.protocol.wire.routes import RouteShape
from streamrl.recipe.algorithms import make_algorithm
from streamrl.telemetry.progress import Progress, Wait

# What rank 0 broadcasts instead of a Start while another learner holds the run.
_WAIT_ON, _LEAVE = b"wait on", b"leave"


def learn(
    *,
    config: schema.Config,
    url: str,
    takeover: bool,
    standby: bool = False,
    world: World,
    stop: threading.Event,
    elastic: bool,
    environment: Mapping[str, str],
) -> RunState:
    """Run one rank from start to end; "running" means that others continue the run."""
    progress = rank_progress(world)
    with ExitStack() as stack:
        server = _connect(config, url, environment, takeover=takeover, standby=standby)
        stack.enter_context(server.client)
        # Before anything slow: workers wait for a learner that reports itself.
        report_as_learner = stack.enter_context(_reporting(config, server, progress))
        context = make_context(config, world, progress, stop=stop, environment=environment, elastic=elastic)
        run = _lead if world.is_main else _follow
        return run(context, server, report_as_learner)


@contextmanager
def _reporting(config: schema.Config, server: Server, progress: Progress) -> Iterator[Callable[[], None]]:
    """Report this rank's progress, or that it is on standby while another learner holds the run.

    Yields a function to call once this learner has the run.
    """
    holder = lease_holder(server.client, server.keys, give_up_after_s=config.redis.give_up_after_s)
    reports_as_learner = holder in (None, server.holder)
    report = partial(write_reports, server.client, server.keys)
    with ExitStack() as stack:

        def report_as_learner() -> None:
            if not reports_as_learner:
                stack.close()
                stack.enter_context(report(progress))

        if reports_as_learner:
            stack.enter_context(report(progress))
        else:
            stack.enter_context(report(standby := standby_progress()))
            stack.enter_context(standby.waiting(Wait.LEASE))
        yield report_as_learner


def _connect(
    config: schema.Config, url: str, environment: Mapping[str, str], *, takeover: bool, standby: bool
) -> Server:
    """Connect to Redis, waiting for the server if the run has already begun.

    After a failover, or while it loads its file, such a server comes back. Before that the address may simply be wrong.
    """
    has_begun = was_restarted(environment) or highest_term(config.folder) > 0
    return Server(
        client=connect(url, config.redis, patience_s=config.redis.give_up_after_s if has_begun else None),
        keys=Keys(config.name),
        holder=holder_name(environment),
        takeover=takeover,
        standby=standby,
        began=job_began(environment),
    )


def _follow(context: RankContext, server: Server, report_as_learner: Callable[[], None]) -> RunState:
    """Every rank except rank 0."""
    policy = load_model_together(context)
    while (message := context.patient.broadcast(None)) == _WAIT_ON:
        share_signals(context.stop, context.patient)
    if message == _LEAVE:
        return "running"
    report_as_learner()
    start = Start.from_bytes(message)
    stream = server.stream(context.config, run_uid=start.run_uid, term=start.term)
    publisher = _make_publisher(context, server, policy, start, stream)
    return work(context, policy, start, conductor=Follower(context), stream=stream, publisher=publisher)


def _lead(context: RankContext, server: Server, report_as_learner: Callable[[], None]) -> RunState:
    """Rank 0: become the run's learner, train, and record how the run ended."""
    config, prompts, held_out = context.config, read_train_prompts(context), read_held_out_prompts(context)
    policy = load_model_together(context)
    check_server(
        server.client,
        max_backlog_bytes=config.redis.max_backlog_bytes,
        max_store_bytes=budget_in_redis(config.weights),
        give_up_after_s=config.redis.give_up_after_s,
    )
    if not _await_lease(context, server):
        return "running"
    report_as_learner()
    # Exporters close last: no longer renewed, so that a released lease stays free, however long they take.
    with ExitStack() as exports, holding_lease(config, server) as keeper:
        admitted = admit(
            config=config, server=server, keeper=keeper, prompts=prompts, fingerprint=context.tokenizer_info.fingerprint
        )
        return _work_and_record(context, server, policy, admitted, keeper, prompts, held_out, exports)


def _await_lease(context: RankContext, server: Server) -> bool:
    """Wait for the lease and return whether rank 0 got it; meanwhile the other ranks are told to wait or leave."""

    def go_on() -> bool:
        context.patient.broadcast(_WAIT_ON)
        share_signals(context.stop, context.patient)
        return not context.stop.is_set()

    with context.progress.waiting(Wait.LEASE):
        has_it = take_lease(context.config, server, takeover=server.takeover, standby=server.standby, go_on=go_on)
    if not has_it:
        context.patient.broadcast(_LEAVE)
    return has_it


def _work_and_record(
    context: RankContext,
    server: Server,
    policy: Policy,
    admitted: Admitted,
    keeper: LeaseKeeper,
    prompts: PromptSet,
    held_out: Sequence[Prompt],
    exports: ExitStack,
) -> RunState:
    """Train, and record in Redis and in the run's folder that the run is running and how it ended.

    `exports` closes the conductor's exporters.
    """
    start, stream = admitted.start, admitted.stream
    note = partial(note_state, context.config.folder, term=start.term)
    note("running")
    try:
        with heeding_peers():
            context.patient.broadcast(start.to_bytes())
            conductor = _make_conductor(context, admitted, keeper, prompts, held_out, policy.routes_wanted)
            exports.enter_context(conductor.exporting())
            publisher = _make_publisher(context, server, policy, start, stream)
            state = work(context, policy, start, conductor=conductor, stream=stream, publisher=publisher)
    except (UserError, TrainingError) as error:
        # No restart can fix this, so record the failure where the monitor shows it.
        stream.event("failed", error=str(error))
        stream.release("failed")
        note("failed", error=str(error))
        raise
    if state != "running":  # the successor has the same holder name and needs no release
        stream.release(state)
        note(state)
    return state


def _make_publisher(
    context: RankContext, server: Server, policy: Policy, start: Start, stream: LearnerStream
) -> Publisher:
    return Publisher(
        policy=policy,
        config=context.config,
        world=context.world,
        run_uid=start.run_uid,
        term=start.term,
        store=open_store(context.config.weights.store, server.client, server.keys),
        announcer=stream,
        canary_ids=start.canary_ids,
        background=BackgroundThread("publisher"),
        sweeping=BackgroundThread("sweeper"),
    )


def _make_conductor(
    context: RankContext,
    admitted: Admitted,
    keeper: LeaseKeeper,
    prompts: PromptSet,
    held_out: Sequence[Prompt],
    routes: RouteShape | None,
) -> Conductor:
    return Conductor(
        context,
        admitted.start,
        prompts=prompts,
        stream=admitted.stream,
        feed=_make_feed(context, admitted, prompts, routes),
        validation=_make_validation(context, admitted, held_out) if held_out else None,
        lease=keeper,
    )


def _make_feed(context: RankContext, admitted: Admitted, prompts: PromptSet, routes: RouteShape | None) -> Feed:
    """The feed, continued from the checkpoint's state."""
    config, start, checkpoint = context.config, admitted.start, admitted.checkpoint
    state = checkpoint.state.stream if checkpoint else None
    since = checkpoint.name.term if checkpoint else 0
    feed = open_feed(
        stream=admitted.stream,
        prompts=prompts,
        config=config,
        run_uid=start.run_uid,
        fingerprint=context.tokenizer_info.fingerprint,
        drop_reason=make_algorithm(config.algorithm).drop_reason,
        quarantine=Quarantine(config.folder, term=start.term),
        order=open_order(config, prompts, root=config.folder, term=start.term, since=since, state=state),
        state=state,
        largest_group_bytes=largest_group(config, routes),
    )
    if state is not None:
        # Repeated in case the checkpoint's writer died before it updated Redis.
        feed.committed(state, step=start.step)
    return feed


def _make_validation(context: RankContext, admitted: Admitted, held_out: Sequence[Prompt]) -> Validation:
    config, start, tokenizer = context.config, admitted.start, context.tokenizer_info.tokenizer
    return Validation(
        stream=admitted.stream,
        prompts=held_out,
        settings=config.validation,
        run_uid=start.run_uid,
        term=start.term,
        fingerprint=context.tokenizer_info.fingerprint,
        max_attempts=config.worker.max_attempts,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        best_by=config.checkpoint.best_by,
    )
