"""Trains from a recording, without Redis and workers: `python -m streamrl.learner --replay DIR ...`.

    tokenizer, recording, prompts ─► model ─► lock, term ─► Start to all ─► restore ─► the usual loop ─► export

Group checks, algorithm and checkpoints are those of a live run; only the stream and the publisher differ
(`groups.replay_stream`, `publishing.unpublished`). Two replays of one recording under one configuration give the same
weights, on CPUs bit for bit at a fixed number of ranks, even if one of them was killed and resumed. They equal the
recorded run's weights if its learner was never interrupted and its Redis lost nothing (otherwise the recording holds
groups that this learner never saw), except for a smaller last step that a drain made of the remaining groups, which a
replay leaves out. A replay is a run of its own, in its own folder, which notes the recording it belongs to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import structlog

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError, TrainingError, UserError
from streamrl.files import create_exclusively, only_one
from streamrl.learner.admission.claim import claim_folder
from streamrl.learner.admission.start import Start, make_start
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.resume import REPLAY
from streamrl.learner.conductor import Conducting, Conductor, Follower
from streamrl.learner.groups.curriculum import UnknownOrder
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.groups.replay_stream import ReplayStream, first_state, survey_groups
from streamrl.learner.metrics.keepsakes import note_state
from streamrl.learner.model.policy import Policy
from streamrl.learner.process.failing import heeding_peers
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.learner.process.ranks import World
from streamrl.learner.publishing.unpublished import Unpublished
from streamrl.learner.rank import work
from streamrl.learner.rank_context import (
    RankContext,
    load_model_together,
    make_context,
    rank_progress,
    read_train_prompts,
)
from streamrl.protocol.recording import Recording
from streamrl.protocol.transport.types import RunState
from streamrl.recipe.algorithms import make_algorithm
from streamrl.versions import term_of

log = structlog.get_logger(__name__)


def replay(
    *, config: schema.Config, folder: Path, world: World, stop: threading.Event, environment: Mapping[str, str]
) -> RunState:
    """Run one rank that trains from the recording in `folder`, from start to end."""
    config = _as_replayed(config)
    context = make_context(config, world, rank_progress(world), stop=stop, environment=environment)
    recording = Recording.open(folder)
    _check(recording, config, context.tokenizer_info.fingerprint)
    with closing(ReplayStream(recording)) as stream:
        return _lead(context, recording, stream) if world.is_main else _follow(context, stream)


def _as_replayed(config: schema.Config) -> schema.Config:
    """Replace the settings that need workers or Redis.

    `lag.stale: wait` chooses groups by when their tickets were issued, which a recording does not hold: groups are
    taken in order instead, and dropped past the same limit.
    """
    return config.model_copy(
        update={
            "redis": config.redis.model_copy(update={"max_backlog_bytes": 1 << 62}),
            "lag": config.lag.model_copy(update={"stale": "drop"}) if config.lag.stale == "wait" else config.lag,
            "validation": config.validation.model_copy(update={"every_steps": 0, "at_start": False, "at_end": False}),
        }
    )


def _follow(context: RankContext, stream: ReplayStream) -> RunState:
    policy = load_model_together(context)
    start = Start.from_bytes(context.patient.broadcast(None))
    return _work(context, policy, start, conductor=Follower(context), stream=stream)


def _lead(context: RankContext, recording: Recording, stream: ReplayStream) -> RunState:
    config, prompts = context.config, read_train_prompts(context)
    policy = load_model_together(context)
    with only_one(config.folder, config.name):
        start, conductor = _begin(context, recording, stream, prompts)
        context.patient.broadcast(start.to_bytes())
        note = partial(note_state, config.folder, term=start.term)
        note("running")
        with conductor.exporting():
            try:
                with heeding_peers():
                    state = _work(context, policy, start, conductor=conductor, stream=stream)
            except (UserError, TrainingError) as error:
                note("failed", error=str(error))
                raise
            note(state)
        return state


def _begin(
    context: RankContext, recording: Recording, stream: ReplayStream, prompts: PromptSet
) -> tuple[Start, Conductor]:
    config = context.config
    _check_place(config.folder, recording)
    recorded = survey_groups(recording)  # before the folder is marked: a damaged recording may be repaired
    create_exclusively(config.folder / REPLAY, json.dumps(_identity(recording)).encode())
    claimed = claim_folder(config, prompts)
    # No token counts as of an abandoned lineage: which of the recorded learners were replaced is unknown here.
    lineage = dict.fromkeys(term_of(version) for version, _ in recorded.versions)
    start = make_start(config, claimed, prompts, lineage=lineage, canary_ids=())
    goes_on_from = str(start.checkpoint)
    log.info("replay started", recording=str(recording.folder), groups=len(recording.places), goes_on_from=goes_on_from)
    num_of_data = prompts.num_places(config.training.max_epochs)
    feed = open_feed(
        stream=stream,
        prompts=prompts,
        config=config,
        run_uid=recording.origin.run_uid,
        fingerprint=recording.origin.fingerprint,
        drop_reason=make_algorithm(config.algorithm).drop_reason,
        state=claimed.checkpoint.state.stream if claimed.checkpoint else first_state(recorded, num_of_data=num_of_data),
        order=UnknownOrder() if config.data.curriculum else None,
        clock=lambda: stream.now_s,
        sleep=lambda seconds: None,
    )
    lease = LeaseKeeper(lambda: None, lease_s=config.learner.lease_s)  # the folder's lock replaces the lease
    return start, Conductor(context, start, prompts=prompts, stream=stream, feed=feed, validation=None, lease=lease)


def _work(
    context: RankContext, policy: Policy, start: Start, *, conductor: Conducting, stream: ReplayStream
) -> RunState:
    """Train; a recording that is used up counts as finished. Only rank 0 knows that, so it broadcasts it."""
    state = work(context, policy, start, conductor=conductor, stream=stream, publisher=Unpublished(start.term))
    used_up = stream.used_up and not context.stop.is_set()
    ended = context.world.broadcast(bytes([used_up]) if context.world.is_main else None)
    if state != "stopped" or not ended[0]:
        return state
    conductor.check_trained()
    log.info("the recording is used up; the rest is too small for a step")
    export(policy, context.tokenizer_info.tokenizer, context.config, context.patient)
    return "finished"


def _check(recording: Recording, config: schema.Config, fingerprint: str) -> None:
    if not recording.places:
        raise DataError(f"{recording.folder}: the recording holds no group")
    if recording.origin.fingerprint != fingerprint:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer or vocabulary is not that of the recorded run, which "
            f"used {recording.origin.model!r}; token ids would mean something else"
        )
    for path, num_bytes in recording.tears.items():
        log.warning("the recording is torn", file=str(path), left_out_bytes=num_bytes)


def _identity(recording: Recording) -> dict[str, str | int]:
    return {
        "recorded_run": recording.origin.run,
        "run_uid": recording.origin.run_uid,
        "num_groups": len(recording.places),
        "first": recording.places[0].entry_id,
        "last": recording.places[-1].entry_id,
    }


def _check_place(folder: Path, recording: Recording) -> None:
    """Refuse a folder that belongs to something else."""
    identity, path = _identity(recording), folder / REPLAY
    if not path.exists():
        if any((folder / name).exists() for name in ("run.json", "terms", "checkpoints")):
            raise ConfigError(
                f"{folder} holds a run that is not a replay: set another name for the replay, as name=again"
            )
        return
    recorded = json.loads(path.read_bytes())
    if recorded != identity:
        raise ConfigError(
            f"{folder} is a replay of another recording (run {recorded['recorded_run']}, "
            f"{recorded['num_groups']} groups) than {recording.folder} is now "
            f"({len(recording.places)} groups to {identity['last']}); set another name"
        )
