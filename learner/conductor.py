"""Rank 0's half of the loop: what all ranks do next, and what the rest of the world learns of it.

    operator, signal, lease, time ─┐
    validation ────────────────────┼─► next_plan ─► STEP | IDLE | COMMIT | PUBLISH | END | STOP
    feed ──────────────────────────┘

Each decision takes about a second at most: when there is nothing to do yet the plan says IDLE, so that the other ranks,
who wait for it in a collective, never come near its timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog
import xxhash

from learner.assessor import Assessor
from learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState, Files
from learner.checkpoints.epochs import CheckpointName, ancestry
from learner.stream.plan import Kind, Plan, Verdict
from streamrl.config import schema
from streamrl.config.check import max_time_s
from streamrl.config.dump import config_to_json
from streamrl.errors import Fenced, RunGone, TransportError
from streamrl.telemetry.progress import Progress, Wait

if TYPE_CHECKING:
    from learner.lease import LeaseKeeper
    from learner.metrics.record import Recorder, Timers
    from learner.publishing.publish import Published
    from learner.rejections import Rejections
    from learner.stream.data import PromptSet
    from learner.stream.feed import Feed
    from learner.suspects import Suspects
    from learner.validation import Validation
    from streamrl.transport.types import Control

_SLICE_S = 1.0
_LOOK_FOR_WEIGHTS_EVERY_S = 5.0

log = structlog.get_logger(__name__)


class RunStream(Protocol):
    """What the conductor asks of the run's stream; tickets and groups are the feed's."""

    def has_manifests(self, versions: Sequence[int]) -> bool: ...

    def event(self, kind: str, **detail: str | int | float) -> None: ...


class Conductor:
    def __init__(
        self,
        *,
        config: schema.Config,
        world_size: int,
        run_uid: str,
        prompts: PromptSet,
        stream: RunStream,
        feed: Feed,
        validation: Validation | None,
        checkpoints: CheckpointRoot,
        lease: LeaseKeeper,
        recorder: Recorder,
        suspects: Suspects | None,  # None: a recording, whose steps are made as recorded, whoever dies
        rejections: Rejections | None,  # None: a recording, which has no workers
        progress: Progress,
        timers: Timers,
        stop: threading.Event,
        first_step: int,  # with which the data began
        job_began: float,  # on `clock`
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._world_size, self._run_uid = config, world_size, run_uid
        self._config_fingerprint = xxhash.xxh3_64_hexdigest(config_to_json(config).encode())
        self._data_fingerprint, self._num_prompts = prompts.fingerprint(), prompts.num_tickets(1)
        self._stream, self._feed = stream, feed
        self._checkpoints, self._lease, self._recorder = checkpoints, lease, recorder
        self._assessor = Assessor(validation=validation, checkpoints=checkpoints, recorder=recorder)
        self._suspects, self._rejections = suspects, rejections
        self._progress, self._timers, self._stop = progress, timers, stop
        self._first_step, self._job_began, self._clock = first_step, job_began, clock
        self._data_epochs = 0.0  # passes over the prompts
        self._control: Control = "run"  # the operator's word, as last seen
        self._newest: int | None = None  # version that is out
        self._needed_weights: tuple[int, ...] = ()  # versions whose manifests Redis must have
        self._look_for_weights_at = 0.0

    def next_plan(self, step: int) -> Plan:
        urgent = self._next_but_training(step)
        if urgent is not None:
            return urgent
        with self._progress.waiting(self._feed.waits_for), self._timers.measure("rollout"):
            try:
                plan = self._feed.plan(step=step, world_size=self._world_size, timeout_s=_SLICE_S)
            except (Fenced, RunGone):
                raise
            except TransportError as error:
                # The lease's thread decides when Redis has been away for too long.
                log.warning("no plan while Redis is away", error=str(error))
                plan = None
        self._show_control()
        if plan is not None and plan.kind is Kind.STEP and self._suspects is not None:
            self._suspects.begin(plan)
        if plan is None and self._feed.waits_for is Wait.GROUPS:
            self._look_for_rejections()
        # Live, since a run whose groups are all dropped makes no step and so no record.
        self._progress.note(**self._feed.metrics())
        return plan or Plan(kind=Kind.IDLE, step=step)

    def next_without_a_step(self, step: int) -> Plan:
        """While weights do not get out, though they should have. That may be for want of room in Redis, where a commit
        would make some."""
        urgent = self._next_but_training(step)
        if urgent is not None:
            return urgent
        if self._told_to_stop():
            return Plan(kind=Kind.STOP, step=step)
        if self._feed.commit_would_free():
            return Plan(kind=Kind.COMMIT, step=step)
        return self.next_after_pause(step)

    def _next_but_training(self, step: int) -> Plan | None:
        self._lease.check()
        self._assessor.poll(wait_s=0.0)
        if self._must_stop():
            return Plan(kind=Kind.STOP, step=step)
        if self._is_over(step):
            return Plan(kind=Kind.END, step=step)
        return Plan(kind=Kind.PUBLISH, step=step) if self._weights_are_lost() else None

    def _weights_are_lost(self) -> bool:
        """Redis was emptied, or went back in time: workers that come now would wait for weights for ever, and we for
        their groups. Looked for after each version, and now and then."""
        if not self._needed_weights or self._clock() < self._look_for_weights_at:
            return False
        self._look_for_weights_at = self._clock() + _LOOK_FOR_WEIGHTS_EVERY_S
        try:
            if self._stream.has_manifests(self._needed_weights):
                return False
        except TransportError as error:
            log.warning("no look for the weights while Redis is away", error=str(error))
            return False
        log.warning("weights lost in Redis", needed=self._needed_weights)
        return True

    def _look_for_rejections(self) -> None:
        """While answers are awaited, and an operator has not said that none shall come."""
        if self._rejections is not None and self._newest is not None and self._feed.control != "pause":
            self._rejections.check(self._newest)

    def _told_to_stop(self) -> bool:
        """By the operator, while the feed is not asked for a plan, which listens by itself."""
        try:
            self._feed.listen()
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            log.warning("the operator cannot be heard while Redis is away", error=str(error))
        self._show_control()
        return self._feed.control == "stop"

    def _show_control(self) -> None:
        """Tell whom it may concern which word of the operator is being followed."""
        control = self._feed.control
        self._progress.note(control=control)
        if control != self._control:
            self._control = control
            self._stream.event("obeys", control=control)

    def next_while_validating(self, step: int) -> Plan:
        """IDLE until the running validation is done; then END, which ends this waiting only."""
        self._lease.check()
        if self._must_stop() or self._told_to_stop():
            return Plan(kind=Kind.STOP, step=step)
        with self._progress.waiting(Wait.EVALUATION):
            self._assessor.poll(wait_s=_SLICE_S)
        if self._assessor.running:
            self._look_for_rejections()
        return Plan(kind=Kind.IDLE if self._assessor.running else Kind.END, step=step)

    def next_while_publishing(self, step: int) -> Plan:
        """IDLE at once, since the publisher is waited for elsewhere; or STOP."""
        self._lease.check()
        return Plan(kind=Kind.STOP if self._must_stop() else Kind.IDLE, step=step)

    def next_after_pause(self, step: int) -> Plan:
        """IDLE, a moment later: before something that failed is tried again."""
        self._lease.check()
        with self._progress.waiting(Wait.WEIGHTS):
            self._stop.wait(_SLICE_S)
        return Plan(kind=Kind.STOP if self._must_stop() else Kind.IDLE, step=step)

    def start_validation(self, latest: Published | None) -> None:
        self._assessor.start(latest)

    def validate_beside(self, step: int, latest: Published | None) -> None:
        self._assessor.start_beside(step, latest)

    def settle(self, plan: Plan, verdicts: Sequence[Verdict], *, trained: bool) -> None:
        if self._suspects is not None:
            self._suspects.survived()
        self._feed.settle(plan, verdicts, trained=trained)
        sound = [entry.ticket for entry, ok in zip(plan.entries, verdicts, strict=True) if ok == Verdict.SOUND]
        if sound and not trained:
            self._stream.event("step_skipped", step=plan.step, tickets=" ".join(map(str, sound)))
        self._data_epochs = (max(entry.ticket for entry in plan.entries) + 1) / self._num_prompts

    def note_published(self, published: Published) -> None:
        self._feed.note_version(published.version, published.step)
        self._newest = published.version
        self._needed_weights, self._look_for_weights_at = published.needs, 0.0
        self._assessor.note_published(published)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        facts = {**self._feed.metrics(), "train_rollouts/epoch": self._data_epochs}
        self._recorder.step(step, {**metrics, **facts})

    def commit(
        self, name: CheckpointName, *, version_n: int, consumed_samples: int, files: Files | None = None
    ) -> None:
        """All ranks have written: make it the newest checkpoint, then tell Redis, then make room."""
        checkpoint = self._checkpoints.commit(
            name,
            CheckpointState(
                run_uid=self._run_uid,
                step=name.step,
                version_n=version_n,
                stream=self._feed.state(),
                config_fingerprint=self._config_fingerprint,
                data_fingerprint=self._data_fingerprint,
                extra={
                    "consumed_samples": consumed_samples,
                    "first_step": self._first_step,
                    "config": self._config.model_dump(mode="json"),  # what a resume compares its own with
                },
            ),
            files=files,
        )
        try:
            self._feed.committed(checkpoint.state.stream, step=name.step)
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            log.warning("Redis does not know of the checkpoint yet; the next one tells it", error=str(error))
        self._assessor.note_committed(name)
        self._prune(name.epoch)
        self._stream.event("checkpoint", name=str(name), step=name.step)

    def _prune(self, epoch: int) -> None:
        settings, undecided = self._config.checkpoint, self._assessor.undecided(epoch)
        try:
            lineage = ancestry(self._config.folder)
            self._checkpoints.prune(
                lineage, epoch=epoch, keep_last=settings.keep_last, keep_best=settings.keep_best, keep=undecided
            )
        except OSError as error:
            log.warning("old checkpoints not removed", error=str(error))

    def _is_over(self, step: int) -> bool:
        return 0 <= self._config.training.max_steps <= step

    def _must_stop(self) -> bool:
        """A signal says so, or this job has had its time: the next one goes on."""
        if self._stop.is_set():
            return True
        limit = self._config.training.max_time
        if limit is None or self._clock() - self._job_began < max_time_s(limit):
            return False
        log.info("the time of this job is over", max_time=limit)
        return True
