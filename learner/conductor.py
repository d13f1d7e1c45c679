"""Rank 0's half of the loop: decides what all ranks do next, and reports what they did.

    operator, signal, lease, time ─┐
    validation ────────────────────┼─► next_plan ─► STEP | IDLE | COMMIT | PUBLISH | END | STOP ─► broadcast
    feed ──────────────────────────┘

A decision takes about a second at most: with nothing to do the plan is IDLE, so that the other ranks, which wait in the
broadcast, never reach its timeout. After each decision all ranks learn whether a signal told one of them to end,
which the next decision heeds. Every rank has a conductor; on all but rank 0 it is a `Follower`, which only receives.

    rank 0   Conductor: decides, broadcasts, records                  others   Follower

`next_plan`, `must_stop` and `poll_validation` are collectives: all ranks call them and get rank 0's decision. The
others report to rank 0 what the ranks did, and do nothing on the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import structlog

from streamrl.config.check import max_time_s
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.resume import settings_to_compare
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.commit import Commit, NoCommit
from streamrl.learner.groups.plan import GroupCheck, Kind, Outcome, Plan
from streamrl.learner.metrics.exporters import open_exporters
from streamrl.learner.metrics.record import Recorder
from streamrl.learner.process.lease import LeaseKeeper, redis_may_be_away
from streamrl.learner.process.stop_flag import share_signals
from streamrl.learner.publishing.newest import NewestVersion, WeightsStream
from streamrl.learner.validation.schedule import ValidationSchedule
from streamrl.telemetry.progress import Wait

if TYPE_CHECKING:
    from streamrl.learner.admission.start import Start
    from streamrl.learner.groups.feed import Feed
    from streamrl.learner.groups.prompts import PromptSet
    from streamrl.learner.publishing.shipping import Published
    from streamrl.learner.rank_context import RankContext
    from streamrl.learner.validation.validation import Validation
    from streamrl.protocol.transport.types import Control
    from streamrl.protocol.wire.group import Group

_SLICE_S = 1.0

log = structlog.get_logger(__name__)


class RunStream(WeightsStream, Protocol):
    """What the conductor needs of the run's stream; the feed handles tickets and groups."""

    def event(self, kind: str, **detail: str | int | float) -> None: ...

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Conductor:
    def __init__(
        self,
        context: RankContext,
        start: Start,
        *,
        prompts: PromptSet,
        stream: RunStream,
        feed: Feed,
        validation: Validation | None,  # None: no validation prompts
        lease: LeaseKeeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = context.config
        self._context, self._config, self._start = context, config, start
        self._stream, self._feed, self._lease = stream, feed, lease
        self._checkpoints = CheckpointRoot(config.folder)
        self._settings_to_compare = settings_to_compare(config)
        self._recorder = Recorder(
            folder=config.folder,
            journal=stream,
            decoder=context.tokenizer_info.tokenizer,
            term=start.term,
            exporters=open_exporters(config, run_uid=start.run_uid),
        )
        self._validation_schedule = ValidationSchedule(
            validation=validation, checkpoints=self._checkpoints, recorder=self._recorder
        )
        self._newest = NewestVersion(stream, give_up_after_s=config.weights.give_up_after_s, clock=clock)
        self._data_fingerprint, self._places_a_pass = prompts.fingerprint(), prompts.num_places(1)
        self._clock = clock
        self._data_epochs = 0.0  # passes over the prompts
        self._control: Control = "run"  # the operator's last known order

    def check_trained(self) -> None:
        """Raise TrainingError if no group was trained, though there is nothing left to train."""
        self._feed.check_trained()

    def exporting(self) -> AbstractContextManager[None]:
        """At the end of the block the metrics' exporters send what is left; takes seconds at most."""
        return self._recorder.exporting()

    # Broadcast to all ranks

    def next_plan(self, step: int, *, may_train: bool = True) -> Plan:
        """What all ranks do next. `may_train=False`: weights cannot be published; do not train further ahead."""
        otherwise = self._next_from_feed if may_train else self._next_without_training
        plan = self._next_before_training(step) or otherwise(step)
        self._broadcast(plan.to_bytes())
        return plan

    def must_stop(self, *, after_s: float = 0.0) -> bool:
        """Whether to end; waits `after_s` first, for a pause between retries."""
        self._lease.check()
        if after_s:
            self._pause(after_s)
        must_stop = self._has_to_stop()
        self._broadcast(bytes([must_stop]))
        return must_stop

    def poll_validation(self) -> Outcome:
        """Poll the running validation and return its outcome."""
        self._lease.check()
        outcome = Outcome.STOPPED
        if not (self._has_to_stop() or self._read_orders() == "stop"):
            with self._context.progress.waiting(Wait.EVALUATION):
                self._poll_validation(wait_s=_SLICE_S)
            outcome = Outcome.WAITING if self._validation_schedule.running else Outcome.DONE
        if outcome is Outcome.WAITING:
            self._check_rejections()
        self._broadcast(bytes([outcome]))
        return outcome

    def _poll_validation(self, *, wait_s: float) -> None:
        self._validation_schedule.poll(wait_s=wait_s, paused=self._feed.control == "pause")

    def _broadcast(self, message: bytes) -> None:
        self._context.watchdog.beat()
        self._context.world.broadcast(message)
        share_signals(self._context.stop, self._context.world)

    # Decisions

    def _next_before_training(self, step: int) -> Plan | None:
        self._lease.check()
        self._poll_validation(wait_s=0.0)
        if self._has_to_stop():
            return Plan(kind=Kind.STOP, step=step)
        if 0 <= self._config.training.max_steps <= step:
            return Plan(kind=Kind.END, step=step)
        return None if self._newest.check_held() else Plan(kind=Kind.PUBLISH, step=step)

    def _next_from_feed(self, step: int) -> Plan:
        plan = None  # stays None if Redis is away: the block is left early
        progress, timers = self._context.progress, self._context.timers
        with progress.waiting(self._feed.waits_for), timers.measure("rollout"), redis_may_be_away("no plan made"):
            plan = self._feed.plan(step=step, world_size=self._context.world.data_size, timeout_s=_SLICE_S)
        self._show_control()
        if plan is not None and plan.kind is Kind.END:
            self._feed.check_trained()
        if plan is None and self._feed.waits_for is Wait.GROUPS:
            self._check_rejections()
        # Reported live: a run whose groups are all dropped makes no step and so no record.
        progress.note(**self._feed.metrics())
        return plan or Plan(kind=Kind.IDLE, step=step)

    def _next_without_training(self, step: int) -> Plan:
        """The next plan while weights that are due cannot be published.

        Redis may be full; then a commit would free memory.
        """
        if self._read_orders() == "stop":
            return Plan(kind=Kind.STOP, step=step)
        if self._feed.request_commit():
            return Plan(kind=Kind.COMMIT, step=step)
        self._pause(_SLICE_S)
        return Plan(kind=Kind.STOP if self._has_to_stop() else Kind.IDLE, step=step)

    def _pause(self, wait_s: float) -> None:
        with self._context.progress.waiting(Wait.WEIGHTS):
            self._context.stop.wait(wait_s)

    def _has_to_stop(self) -> bool:
        """Whether a signal came or this job's time is up; the next job continues the run."""
        if self._context.stop.is_set():
            return True
        limit = self._config.training.max_time
        if limit is None or self._clock() - self._context.job_began < max_time_s(limit):
            return False
        log.info("time limit of this job reached", max_time=limit)
        return True

    def _check_rejections(self) -> None:
        """Check for workers that reject the weights, unless the operator has paused the run."""
        if self._feed.control != "pause":
            self._newest.check_rejections()

    def _read_orders(self) -> Control:
        """Read the operator's orders, for rounds without a feed plan (`feed.plan` reads them itself)."""
        with redis_may_be_away("operator's orders not read"):
            self._feed.listen()
        self._show_control()
        return self._feed.control

    def _show_control(self) -> None:
        """Report which of the operator's orders is in effect."""
        control = self._feed.control
        self._context.progress.note(control=control)
        if control != self._control:
            self._control = control
            self._stream.event("obeys", control=control)

    # Reports of what the ranks did

    def validate(self, step: int, latest: Published | None) -> None:
        """Validate the newest published version, or the next one if its weights are older than this step's.

        Does not wait: training may continue meanwhile.
        """
        self._validation_schedule.start(step, latest)

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None:
        """Record the verdicts on the plan's groups, and whether an update was made from them."""
        self._feed.settle(plan, verdicts, trained=trained)
        self._context.progress.advanced()  # also without a step: the next batch is trained under the same activity
        sound = [entry.ticket for entry, ok in zip(plan.entries, verdicts, strict=True) if ok == GroupCheck.SOUND]
        if sound and not trained:
            self._stream.event("step_skipped", step=plan.step, tickets=" ".join(map(str, sound)))
        end = max(entry.ticket for entry in plan.entries) + 1
        self._data_epochs = self._feed.num_places(end) / self._places_a_pass

    def note_published(self, published: Published) -> None:
        self._feed.note_version(published.version, published.step)
        self._newest.note(published)
        self._validation_schedule.note_published(published)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        feed_metrics = {**self._feed.metrics(), "train_rollouts/epoch": self._data_epochs}
        self._recorder.step(step, {**metrics, **feed_metrics})

    def keep_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some of this rank's trained rollouts readable after the stream has trimmed them."""
        self._recorder.rollouts(step, groups)

    def begin_commit(self, name: CheckpointName, *, consumed_samples: int) -> Commit:
        """Start the commit of a checkpoint with the stream's current state."""
        state = CheckpointState(
            run_uid=self._start.run_uid,
            step=name.step,
            stream=self._feed.state(),
            data_fingerprint=self._data_fingerprint,
            extra={
                "consumed_samples": consumed_samples,
                "first_step": self._start.first_step,
                **self._settings_to_compare,
            },
        )
        return Commit(
            name,
            state,
            checkpoints=self._checkpoints,
            settings=self._config.checkpoint,
            feed=self._feed,
            validation_schedule=self._validation_schedule,
            event=self._stream.event,
        )


class Follower:
    def __init__(self, context: RankContext) -> None:
        self._context = context

    def check_trained(self) -> None: ...

    def next_plan(self, step: int, *, may_train: bool = True) -> Plan:
        return Plan.from_bytes(self._receive())

    def must_stop(self, *, after_s: float = 0.0) -> bool:
        return bool(self._receive()[0])

    def poll_validation(self) -> Outcome:
        return Outcome(self._receive()[0])

    def _receive(self) -> bytes:
        self._context.watchdog.beat()
        with self._context.progress.waiting(Wait.PEERS):
            message = self._context.world.broadcast(None)
            share_signals(self._context.stop, self._context.world)
        return message

    def validate(self, step: int, latest: Published | None) -> None: ...

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None: ...

    def note_published(self, published: Published) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...

    def keep_rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def begin_commit(self, name: CheckpointName, *, consumed_samples: int) -> NoCommit:
        return NoCommit()


Conducting = Conductor | Follower
