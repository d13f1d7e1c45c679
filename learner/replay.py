"""Learning from a recording, without Redis and without workers: `python -m learner --config FILE --replay DIR`.

    tokenizer, recording, prompts ─► model ─► lock, epoch ─► Start to all ─► restore ─► the loop of every run ─► export

The same validation, algorithm and checkpoints as in a live run; only the stream and the publisher differ
(learner.replayed). Two replays of one recording under one configuration give the same weights, bit by bit at a fixed
number of ranks, also when one of them was killed and resumed; and those of the recorded run, if its learner was never
interrupted. A replay is a run of its own, in a folder of its own, and its folder remembers which recording it is of.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import structlog
import torch

from learner.checkpoints.export import export
from learner.conductor import Conductor
from learner.distributed import World
from learner.job import job_began
from learner.lease import LeaseKeeper
from learner.metrics.exporters import check_exporters, open_exporters
from learner.metrics.record import Recorder, Timers
from learner.policy.model import Policy, load_policy, read_speech
from learner.policy.trial import try_out
from learner.rank import Surroundings, at_disk_s, read_prompts_of, stall_limit_s, work
from learner.replayed import ReplayFeed, ReplayStream, Unpublished, as_replayed, versions_of
from learner.start import REPLAY, Claimed, Start, claim_folder, make_start
from learner.stream.data import PromptSet
from learner.watchdog import Watchdog
from streamrl.config import schema
from streamrl.durable import create_exclusively
from streamrl.errors import ConfigError, DataError
from streamrl.launch.parts import RunFolder
from streamrl.launch.preflight import only_one
from streamrl.recipe.algorithms import make_algorithm
from streamrl.record.read import Recording
from streamrl.telemetry.progress import Progress
from streamrl.transport.types import RunState
from streamrl.versions import epoch_of

log = structlog.get_logger(__name__)


def replay(
    *, config: schema.Config, folder: Path, world: World, stop: threading.Event, environment: Mapping[str, str]
) -> RunState:
    """The whole life of one rank that learns from the recording in this folder."""
    config = as_replayed(config)
    patient = world.beside(timeout_s=at_disk_s(config))
    if world.is_main:
        check_exporters(config)
        try_out(config.algorithm)
    speech = read_speech(config.model.path)
    recording = Recording.open(folder)
    _check(recording, config, speech.fingerprint)
    prompts = read_prompts_of(config, speech)[0] if world.is_main else None
    patient.barrier()  # rank 0 reads them for as long as it takes
    torch.manual_seed(config.seed)
    policy = load_policy(config, world, speech.end_ids)
    around = Surroundings(
        config=config,
        world=world,
        patient=patient,
        speech=speech,
        progress=Progress(part=f"learner/{world.rank}", role="learner"),
        watchdog=Watchdog(limit_s=stall_limit_s(config), at_disk_s=at_disk_s(config)),
        timers=Timers(),
        stop=stop,
        job_began=job_began(environment),
    )
    with ExitStack() as stack:
        stream = ReplayStream(recording)
        stack.callback(stream.close)
        if prompts is None:
            start, conductor = Start.from_bytes(patient.broadcast_bytes(None)), None
        else:
            stack.enter_context(only_one(RunFolder(config.folder).lock, config.name))
            start, conductor = _lead(around, recording, stream, prompts)
            patient.broadcast_bytes(start.to_bytes())
        publisher = Unpublished(start.epoch)
        state = work(around, policy, start, conductor=conductor, stream=stream, publisher=publisher)
        return _close(around, policy, stream, state)


def _lead(
    around: Surroundings, recording: Recording, stream: ReplayStream, prompts: PromptSet
) -> tuple[Start, Conductor]:
    config = around.config
    _mark(config.folder, recording)
    claimed = claim_folder(config, prompts)
    versions = versions_of(recording)
    recorded_epochs = sorted({epoch_of(version) for version, _ in versions})
    # No token counts as one of a dead lineage: which of the recorded run's learners were replaced is not known here.
    lineage = tuple((epoch, None) for epoch in recorded_epochs)
    start = make_start(config, claimed, prompts, lineage=lineage, canary_ids=())
    log.info("replays", recording=str(recording.folder), groups=len(recording.places), goes_on_from=start.checkpoint)
    feed = ReplayFeed(
        stream=stream,
        recording=recording,
        versions=versions,
        prompts=prompts,
        config=config,
        keep=make_algorithm(config.algorithm).drop_reason,
        state=claimed.checkpoint.state.stream if claimed.checkpoint else None,
    )
    return start, _make_conductor(around, claimed, stream, feed, prompts, start)


def _make_conductor(
    around: Surroundings,
    claimed: Claimed,
    stream: ReplayStream,
    feed: ReplayFeed,
    prompts: PromptSet,
    start: Start,
) -> Conductor:
    config = around.config
    return Conductor(
        config=config,
        world_size=around.world.size,
        run_uid=start.run_uid,
        prompts=prompts,
        stream=stream,
        feed=feed,
        validation=None,
        checkpoints=claimed.checkpoints,
        lease=LeaseKeeper(lambda: None, lease_s=config.learner.lease_s),  # the folder's lock is held instead
        recorder=Recorder(
            folder=config.folder,
            journal=stream,
            decoder=around.speech.tokenizer,
            epoch=start.epoch,
            exporters=open_exporters(config, run_uid=start.run_uid),
        ),
        suspects=None,
        rejections=None,
        progress=around.progress,
        timers=around.timers,
        stop=around.stop,
        first_step=start.first_step,
        job_began=around.job_began,
    )


def _close(around: Surroundings, policy: Policy, stream: ReplayStream, state: RunState) -> RunState:
    """A recording that is used up is an end like any other. Rank 0 alone reads it, so all hear it from there."""
    used_up = stream.used_up and not around.stop.is_set()
    told = around.world.broadcast(np.array([used_up], dtype=np.int64) if around.world.is_main else None)
    if state != "stopped" or not told[0]:
        return state
    log.info("the recording is used up; what is left of it is too little for a step")
    export(policy, around.speech.tokenizer, around.config, around.patient)
    return "finished"


def _check(recording: Recording, config: schema.Config, fingerprint: str) -> None:
    if not recording.places:
        raise DataError(f"{recording.folder}: the recording holds no group")
    if recording.origin.fingerprint != fingerprint:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer or vocabulary is not that of the recorded run, which "
            f"used {recording.origin.model!r}; token ids would mean something else"
        )
    for tear in recording.tears:
        log.warning("the recording is torn", file=str(tear.path), left_out_bytes=tear.num_bytes)


def _mark(folder: Path, recording: Recording) -> None:
    """Note in the run's folder which recording it learns from; refuse a folder that learns from something else."""
    here = {
        "recorded_run": recording.origin.run,
        "run_uid": recording.origin.run_uid,
        "num_groups": len(recording.places),
        "first": recording.places[0].entry_id,
        "last": recording.places[-1].entry_id,
    }
    path = folder / REPLAY
    if not path.exists() and (folder / "checkpoints").exists():
        raise ConfigError(f"{folder} holds a run that is no replay: set another name for the replay, as name=again")
    if create_exclusively(path, json.dumps(here).encode()):
        return
    before = json.loads(path.read_bytes())
    if before != here:
        raise ConfigError(
            f"{folder} is a replay of another recording (run {before['recorded_run']}, {before['num_groups']} groups) "
            f"than {recording.folder} is now ({len(recording.places)} groups to {here['last']}); set another name"
        )
