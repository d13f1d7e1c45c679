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
from typing import TYPE_CHECKING

import structlog
import xxhash

from learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState, Files
from learner.checkpoints.epochs import CheckpointName, ancestry
from learner.checkpoints.scores import write_score
from learner.stream.plan import Kind, Plan, Verdict
from streamrl.config import schema
from streamrl.config.check import max_time_s
from streamrl.config.dump import config_to_json
from streamrl.errors import Fenced, RunGone, TransportError
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import epoch_of

if TYPE_CHECKING:
    from learner.lease import LeaseKeeper
    from learner.metrics.record import Recorder, Timers
    from learner.publishing.publish import Published
    from learner.stream.data import PromptSet
    from learner.stream.feed import Feed
    from learner.suspects import Suspects
    from learner.validation import Validation, ValidationResult
    from streamrl.transport.learner import LearnerStream
    from streamrl.transport.types import Control, RunState

_SLICE_S = 1.0
_LOOK_FOR_WEIGHTS_EVERY_S = 5.0

log = structlog.get_logger(__name__)


class Conductor:
    def __init__(
        self,
        *,
        config: schema.Config,
        world_size: int,
        run_uid: str,
        prompts: PromptSet,
        stream: LearnerStream,
        feed: Feed,
        validation: Validation | None,
        checkpoints: CheckpointRoot,
        lease: LeaseKeeper,
        recorder: Recorder,
        suspects: Suspects | None,  # None: a recording, whose steps are made as recorded, whoever dies
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
        self._stream, self._feed, self._validation = stream, feed, validation
        self._checkpoints, self._lease, self._recorder = checkpoints, lease, recorder
        self._suspects = suspects
        self._progress, self._timers, self._stop = progress, timers, stop
        self._first_step, self._job_began, self._clock = first_step, job_began, clock
        self._validated: ValidationResult | None = None  # the newest
        self._validated_of: frozenset[CheckpointName] = frozenset()  # whose weights it tells of
        self._validating: frozenset[CheckpointName] = frozenset()  # likewise, of the one that runs
        self._validation_due: int | None = None  # since this step; it waits for a version of it to get out
        self._data_epochs = 0.0  # passes over the prompts
        self._control: Control = "run"  # the operator's word, as last seen
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
        self._poll_validation(wait_s=0.0)
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
            self._poll_validation(wait_s=_SLICE_S)
        running = self._validation is not None and self._validation.running
        return Plan(kind=Kind.IDLE if running else Kind.END, step=step)

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
        """Of the newest version, unless all answers of it are there; one that still runs is left to finish."""
        if latest is None or self._validation is None or self._validation.running:
            return
        last = self._validated
        if last is None or last.version != latest.version or not last.complete:
            self._start_validation(self._validation, latest, of_step=latest.step)

    def validate_beside(self, step: int, latest: Published | None) -> None:
        """Of the weights of this step, or of the next that get out: as soon as workers can have them. One that still
        runs is left to finish."""
        if self._validation is None or self._validation.running:
            return
        self._validation_due = step
        if latest is not None:
            self._start_if_due(latest)

    def _start_if_due(self, latest: Published) -> None:
        due = self._validation_due
        if self._validation is not None and due is not None and latest.step >= due:
            self._start_validation(self._validation, latest, of_step=due)

    def _start_validation(self, validation: Validation, latest: Published, *, of_step: int) -> None:
        self._validation_due = None
        try:
            validation.start(step=latest.step, version=latest.version)
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            log.warning("no validation while Redis is away", error=str(error))
            return
        self._validating = frozenset(CheckpointName(epoch_of(latest.version), s) for s in (of_step, latest.step))

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
        self._needed_weights, self._look_for_weights_at = published.needs, 0.0
        self._start_if_due(published)

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
        if name in self._validated_of:
            self._score(name)
        self._prune(name.epoch)
        self._stream.event("checkpoint", name=str(name), step=name.step)

    def _prune(self, epoch: int) -> None:
        settings = self._config.checkpoint
        unknown = self._validating  # how good they are is being found out
        if self._validation_due is not None:
            unknown |= {CheckpointName(epoch, self._validation_due)}
        try:
            lineage = ancestry(self._config.folder)
            self._checkpoints.prune(
                lineage, epoch=epoch, keep_last=settings.keep_last, keep_best=settings.keep_best, keep=unknown
            )
        except OSError as error:
            log.warning("old checkpoints not removed", error=str(error))

    def release(self, state: RunState) -> None:
        self._stream.release(state)

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

    def _poll_validation(self, *, wait_s: float) -> None:
        if self._validation is None:
            return
        try:
            result = self._validation.poll(wait_s=wait_s)
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            log.warning("no validation while Redis is away", error=str(error))
            return
        if result is not None:
            self._validated = result
            self._validated_of, self._validating = self._validating, frozenset()
            self._recorder.validation(result)
            for name in self._validated_of:
                self._score(name)

    def _score(self, name: CheckpointName) -> None:
        assert self._validated is not None, "a result is there"
        try:
            write_score(self._checkpoints.folder_of(name), self._validated.metrics())
        except OSError as error:
            log.warning("score of a checkpoint not written", checkpoint=str(name), error=str(error))
