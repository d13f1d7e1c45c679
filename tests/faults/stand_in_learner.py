"""A learner without a model, as a process that can be killed.

    lease ─► term ─► claim ─► [conductor's plan ─► settle ─► publish ─► checkpoint, beside the loop] ... ─► release

Admission, conductor, feed, checkpoints and their writer, journal, blobs and streams are the real ones. Only the tensors
are missing: a checkpoint holds some bytes instead, a version a text that names it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import redis

from streamrl.config import schema
from streamrl.errors import Fenced, TransportError
from streamrl.learner.admission.admit import Admitted, admit
from streamrl.learner.admission.server import Server, holding_lease, take_lease
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.save import RankStateDouble, Saver
from streamrl.learner.conductor import Conductor
from streamrl.learner.groups.curriculum import open_order
from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from streamrl.learner.groups.prompts import PromptSet
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.learner.metrics.keepsakes import append_line
from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.format import blob_name, digest_of
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.retention import collectable
from streamrl.protocol.weights.stores import BlobStore, open_store
from streamrl.protocol.wire.group import GroupHeader
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version, show
from tests.faults.place import Place
from tests.feed_world import MODEL, drop_reason, make_prompts

STEP = "step "  # prefix of an output line for each step
_VERSION = "version "
_VOCABULARY = 1 << 20
_CHUNK_BYTES = 64  # so that a version has several chunks
_NUM_KEPT = 2  # versions


@dataclass(frozen=True, slots=True)
class _Published:
    version: int
    step: int

    @property
    def needs(self) -> tuple[int, ...]:
        return (self.version,)


def _alone() -> Any:
    """A world of one rank."""
    return SimpleNamespace(
        data_size=1,
        is_main=True,
        broadcast=lambda words: words,
        largest=lambda values: values,
        all_agree=lambda mine: mine,
        gather_bytes=lambda words: [words],
    )


def _surroundings(config: schema.Config) -> Any:
    """What the conductor uses; the real classes import torch, which takes seconds."""
    return SimpleNamespace(
        config=config,
        world=_alone(),
        tokenizer_info=SimpleNamespace(tokenizer=None),
        progress=Progress(part="learner/0", role="learner"),
        timers=Timers(),
        watchdog=SimpleNamespace(beat=lambda: None),
        stop=threading.Event(),
        job_began=time.monotonic(),
    )


def versions_in(output: str) -> list[int]:
    """Return the versions that a learner has numbered, announced or not."""
    return [int(line.removeprefix(_VERSION)) for line in output.splitlines() if line.startswith(_VERSION)]


def weights_of(version: int) -> bytes:
    return f"the weights of version {show(version)}. ".encode() * 10


def open_store_of(config: schema.Config, client: redis.Redis, keys: Keys) -> BlobStore:
    if config.weights.store == "redis:":
        return RedisStore(client, keys, chunk_bytes=_CHUNK_BYTES)
    return open_store(config.weights.store, client, keys)


def learn(place: Place, *, holder: str, takeover: bool) -> None:
    """Run the learner's whole life. Fenced if another learner exists."""
    config, prompts = place.config(), make_prompts(place.num_prompts, own_tokens=True)
    with connect(place.url, config.redis) as client:
        keys = Keys(config.name)
        server = Server(client=client, keys=keys, holder=holder, began=time.monotonic())
        take_lease(config, server, takeover=takeover)
        with holding_lease(config, server) as keeper:
            admitted = admit(
                config=config,
                server=server,
                keeper=keeper,
                prompts=prompts,
                fingerprint=MODEL,
            )
            done = _Loop(place, admitted, keeper, prompts, open_store_of(config, client, keys)).run()
            admitted.stream.release("finished" if done else "failed")


class _Loop:
    def __init__(
        self, place: Place, admitted: Admitted, keeper: LeaseKeeper, prompts: PromptSet, store: BlobStore
    ) -> None:
        config = place.config()
        self._deadly_ticket, self._step_s, self._stream = place.deadly_ticket, place.step_s, admitted.stream
        start, state = admitted.start, admitted.checkpoint.state.stream if admitted.checkpoint else None
        self._config, self._start = config, start
        self._step = start.step
        self._publisher = _Publisher(admitted.stream, store, run_uid=start.run_uid, term=start.term)
        feed = open_feed(
            stream=admitted.stream,
            prompts=prompts,
            config=config,
            run_uid=start.run_uid,
            fingerprint=MODEL,
            drop_reason=drop_reason,
            quarantine=Quarantine(config.folder, term=start.term),
            order=open_order(
                config,
                prompts,
                root=config.folder,
                term=start.term,
                since=start.checkpoint.term if start.checkpoint else 0,
                state=state,
            ),
            state=state,
        )
        if state is not None:
            feed.committed(state, step=start.step)
        self._conductor = Conductor(
            _surroundings(config),
            start,
            prompts=prompts,
            stream=admitted.stream,
            feed=feed,
            validation=None,
            lease=keeper,
        )
        self._background = BackgroundThread("checkpoints")
        self._saver = Saver(
            state=RankStateDouble(),
            world=_alone(),
            checkpoints=CheckpointRoot(config.folder),
            conductor=self._conductor,
            term=start.term,
            background=self._background,
            timers=Timers(),
        )

    def run(self) -> bool:
        """Return whether the last checkpoint could be written."""
        with self._background.working(join_s=1.0):
            self._publish()
            while (plan := self._next_plan()).kind not in (Kind.END, Kind.STOP):
                if plan.kind is Kind.STEP:
                    self._train_on(plan)
                elif plan.kind is Kind.COMMIT:
                    self._begin_checkpoint()
                elif plan.kind is Kind.PUBLISH:
                    self._publish()
            return self._saver.save(self._step, consumed_samples=0)

    def _next_plan(self) -> Plan:
        if self._saver.busy:
            self._saver.settle()
        return self._conductor.next_plan(self._step)

    def _train_on(self, plan: Plan) -> None:
        if self._deadly_ticket in [entry.ticket for entry in plan.entries]:
            os.kill(os.getpid(), signal.SIGKILL)
        fetched = fetch_groups(self._stream, plan, rank=0, vocabulary=_VOCABULARY)
        self._conductor.settle(plan, [GroupCheck(int(one)) for one in fetched.verdicts], trained=bool(fetched.groups))
        if not fetched.groups:
            return
        time.sleep(self._step_s)
        self._step += 1
        self._record([group.header for group in fetched.groups])
        print(f"{STEP}{self._step}")
        self._publish()
        if self._step % self._config.checkpoint.every_steps == 0:
            self._begin_checkpoint()

    def _begin_checkpoint(self) -> None:
        self._saver.begin(self._step, consumed_samples=0)

    def _record(self, trained: Sequence[GroupHeader]) -> None:
        """Record the metrics that a judge needs to tell what was trained; the real record has more."""
        samples = sum(len(header.sample_lengths) for header in trained)
        prompts = sum(header.num_prompt_tokens * len(header.sample_lengths) for header in trained)
        row = {
            "step": self._step,
            "term": self._start.term,
            "train_rollouts/rollout_size": samples,
            "train_rollouts/rewards": sum(sum(header.sample_rewards) for header in trained) / samples,
            "train_rollouts/response_lengths": sum(sum(header.sample_lengths) for header in trained) / samples,
            "train_rollouts/prompt_lengths": prompts / samples,
            "timers/generate": sum(header.generate_s for header in trained) / len(trained),
        }
        self._stream.record(self._step, row)  # first, like the real one: a fenced learner writes no line
        append_line(self._config.folder / "metrics.jsonl", row)

    def _publish(self) -> None:
        """Publish like the real publisher: what the store refuses is retried with the next step's weights."""
        try:
            self._conductor.note_published(self._publisher.publish(self._step))
        except Fenced:
            raise
        except TransportError as error:
            print(error)


class _Publisher:
    """Publishes every version in one blob, whose name is the whole manifest, for the later anchor as well."""

    def __init__(self, stream: LearnerStream, store: BlobStore, *, run_uid: str, term: int) -> None:
        self._stream, self._store, self._run_uid, self._term = stream, store, run_uid, term
        self._blobs: dict[int, str] = {}
        self.last_n = -1

    def publish(self, step: int) -> _Published:
        self.last_n += 1
        version = make_version(self._term, self.last_n)
        print(f"{_VERSION}{version}")
        data = weights_of(version)
        name = blob_name(run_uid=self._run_uid, version=version, rank=0, digest=digest_of(data))
        self._store.put(name, data)
        self._blobs = dict([*self._blobs.items(), (version, name)][-_NUM_KEPT:])
        announcement = Announcement(version=version, base=0, step=step, manifest=name.encode())
        self._stream.announce(announcement, keep=list(self._blobs))
        self._stream.amend(announcement, keep=list(self._blobs))
        names = self._store.list(prefix=f"{self._run_uid}/")
        for old in collectable(names, keep=self._blobs.values(), run_uid=self._run_uid, term=self._term):
            self._store.delete(old)
        return _Published(version, step)
