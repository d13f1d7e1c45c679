"""The training loop, run by every rank.

              rank 0                                       every rank
    ┌── next plan: tickets, groups ──► broadcast ──► fetch own groups, verify ──► verdicts, all-reduced
    │                                                                                    │
    │                                    AdamW ◄── finite? clip ◄── gradients of packed micro-batches
    │                                      │
    └── record ◄── checkpoint ◄── publish ◄── settle

To publish and to save, each rank only copies its own state; the rest overlaps the next steps.

A round executes one plan. Rank 0 decides within about a second and sends IDLE when there is nothing to do, so that no
rank blocks for long without a reason that the monitor shows. All ranks follow the same plan under the same settings, so
decisions that depend only on these (publish now? checkpoint now?) need no communication. The loop never branches on the
rank or on live versus replay: the conductor and the publisher do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import structlog
import torch

from streamrl.errors import NotPublished, TrainingError
from streamrl.learner.admission.start import Start
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.save import Saver
from streamrl.learner.conductor import Conducting
from streamrl.learner.groups.fetch import Fetched, fetch_groups
from streamrl.learner.groups.lag import oldest_trained_step
from streamrl.learner.groups.plan import GroupCheck, Kind, Outcome, Plan
from streamrl.learner.metrics.gpu import Gpu, peak_flops
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Batch, Gradients
from streamrl.learner.objective.optimizer import Update, learning_rate, update
from streamrl.learner.publishing.publish import Publishing
from streamrl.learner.publishing.schedule import PublishSchedule
from streamrl.learner.rank_context import RankContext
from streamrl.protocol.transport.types import GroupStream, RunState
from streamrl.protocol.wire.group import Group

_RETRY_PAUSE_S = 1.0  # before another attempt to publish
_REFUSED = "checkpoint/refused"

log = structlog.get_logger(__name__)


class Loop:
    def __init__(
        self,
        context: RankContext,
        *,
        start: Start,
        stream: GroupStream,  # source of this rank's groups
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        publisher: Publishing,
        saver: Saver,
        conductor: Conducting,
    ) -> None:
        self._context, self._config, self._world = context, context.config, context.world
        self._progress, self._timers = context.progress, context.timers
        self._start, self._stream, self._conductor, self._saver = start, stream, conductor, saver
        self._policy, self._optimizer, self._gradients = policy, optimizer, gradients
        self._publish_schedule = PublishSchedule(
            publisher=publisher,
            max_ahead=context.config.lag.max_steps,
            conductor=conductor,
            progress=context.progress,
            timers=context.timers,
        )
        self._gpu = Gpu(context.world.device)
        self._step = start.step  # optimizer steps made
        self._consumed_samples = start.consumed_samples
        self._num_skipped = self._num_skipped_in_row = 0
        self._step_began = time.perf_counter()
        context.progress.take_waits()  # a standby has waited for days by now, and no step has begun

    def run(self) -> RunState:
        """Train until the data, steps or time run out, or the operator stops the run."""
        try:
            finished = self._begin() and self._train() and self._close()
        except NotPublished:  # all ranks raise it together, between two steps
            self._save_last()
            raise
        if not self._save_last():
            raise TrainingError(f"the last checkpoint could not be written to {self._config.folder}; the log says why")
        if not finished:
            return "stopped"
        self._progress.working("export")
        with self._context.watchdog.at_disk():
            export(self._policy, self._context.tokenizer_info.tokenizer, self._config, self._context.patient)
        return "finished"

    # The three phases. False, here and below: stopped before the end

    def _begin(self) -> bool:
        """Publish the first weights and validate them, before any ticket is issued."""
        fresh = self._start.checkpoint is None
        return self._publish() and (self._validate() if fresh and self._config.validation.at_start else True)

    def _train(self) -> bool:
        while True:
            self._publish_schedule.settle()
            self._settle_checkpoint()
            # If newer weights cannot be published, workers would answer with stale tokens.
            plan = self._conductor.next_plan(self._step, may_train=self._publish_schedule.keeps_up(self._step))
            match plan.kind:
                case Kind.STEP:
                    self._make_step(plan)
                case Kind.IDLE:
                    self._publish_schedule.retry(self._step)
                case Kind.COMMIT:
                    self._save()
                case Kind.PUBLISH:
                    self._publish_schedule.send_whole(self._step)
                case Kind.END | Kind.STOP:
                    return plan.kind is Kind.END

    def _close(self) -> bool:
        """Publish the final weights and validate them."""
        if not self._publish_schedule.wait():
            return False
        latest = self._publish_schedule.latest
        if (latest is None or latest.step != self._step) and not self._publish():
            return False
        return self._validate() if self._config.validation.at_end else True

    def _publish(self) -> bool:
        """Publish, retrying until it succeeds or the run must stop."""
        while not self._publish_schedule.send(self._step):
            if self._conductor.must_stop(after_s=_RETRY_PAUSE_S):
                return False
        return True

    def _validate(self) -> bool:
        """Validate the newest version, once any validation of an older one has finished."""
        if not self._await_validation():
            return False
        self._conductor.validate(self._step, self._publish_schedule.latest)
        return self._await_validation()

    def _await_validation(self) -> bool:
        while (outcome := self._conductor.poll_validation()) is Outcome.WAITING:
            self._settle_checkpoint()
        return outcome is Outcome.DONE

    # One step

    def _make_step(self, plan: Plan) -> None:
        """Make one optimizer step from the plan's groups.

        fetch ─► gradients ─► updates ─► settle ─► publish ─► validate ─► checkpoint ─► record
        """
        self._progress.working("train")
        tally = Tally(sources=self._config.reward_sources, step=self._step, is_dead=self._start.is_dead)
        fetched, verdicts = self._fetch(plan)
        tally.add_masked(fetched.num_masked)
        groups = fetched.agreed(verdicts)
        updates = self._learn(groups, tally, self._rate(plan)) if GroupCheck.SOUND in verdicts else []
        applied = [one for one in updates if one.applied]
        self._conductor.settle(plan, verdicts, trained=bool(applied))
        self._count_skipped(updates)
        if not applied:
            return
        self._step += 1
        if self._step % self._config.weights.publish_every == 0:
            self._publish_schedule.send_in_background(self._step)
        if self._config.validation.every_steps and self._step % self._config.validation.every_steps == 0:
            self._conductor.validate(self._step, self._publish_schedule.latest)
        metrics = tally.metrics(self._world)
        self._consumed_samples += int(metrics["train_rollouts/rollout_size"])
        if self._step % self._config.checkpoint.every_steps == 0:
            self._save()
        self._record(metrics, applied[-1])
        self._conductor.keep_rollouts(self._step, groups)
        self._progress.advanced(step=self._step)

    def _fetch(self, plan: Plan) -> tuple[Fetched, list[GroupCheck]]:
        """Return this rank's groups, and the verdicts of all ranks on every group of the plan."""
        fetched = fetch_groups(
            self._stream,
            plan,
            rank=self._world.data_rank,
            vocabulary=self._context.tokenizer_info.vocabulary,
            oldest_step=oldest_trained_step(self._config.lag, plan.step),
            needs_teacher=self._config.teacher is not None and bool(self._config.teacher.urls),
            routes=self._policy.routes_wanted,
        )
        return fetched, [GroupCheck(int(verdict)) for verdict in self._world.largest(fetched.verdicts)]

    def _rate(self, plan: Plan) -> float:
        start = self._start
        num_batches = plan.num_answered / self._config.training.groups_per_step
        return learning_rate(
            self._step - start.first_step,
            self._config.optimizer,
            total_steps=start.total_steps,
            position=start.position(self._step, num_batches=num_batches),
        )

    def _learn(self, groups: Sequence[Group], tally: Tally, lr: float) -> list[Update]:
        """Make one update for each pass over the batch, ending after a skipped one."""
        made: list[Update] = []
        with self._timers.measure("train"), self._context.watchdog.computing():
            with self._timers.measure("init_logprobs"):
                batch = self._gradients.prepare(groups, tally)
            while len(made) < self._config.algorithm.reinforce_epochs and (not made or made[-1].applied):
                made.append(self._pass(batch, tally, lr))
        return made

    def _pass(self, batch: Batch, tally: Tally, lr: float) -> Update:
        with self._timers.measure("logprobs"):
            loss = self._gradients.accumulate(batch, tally)
        return update(
            self._optimizer,
            loss=loss,
            lr=lr,
            clip_norm=self._config.optimizer.clip_norm,
            world=self._world,
        )

    def _count_skipped(self, updates: Sequence[Update]) -> None:
        """Count skipped steps and raise after too many in a row; all ranks count alike, so all stop together."""
        if not updates:
            return
        made = updates[-1]
        if made.applied:
            self._num_skipped_in_row = 0
            return
        self._num_skipped += 1
        self._num_skipped_in_row += 1
        log.warning("step skipped", step=self._step, loss=made.loss, grad_norm=made.grad_norm)
        if self._num_skipped_in_row >= self._config.training.max_skipped_in_row:
            raise TrainingError(
                f"{self._num_skipped_in_row} steps in a row had a non-finite loss or gradient "
                f"(training.max_skipped_in_row); the last checkpoint is sound: try a smaller optimizer.lr"
            )

    def _save(self) -> None:
        """Copy the current state; it is written while training continues."""
        self._progress.working("checkpoint")
        with self._context.watchdog.at_disk(), self._timers.measure("checkpoint"):
            self._saver.begin(self._step, consumed_samples=self._consumed_samples)

    def _settle_checkpoint(self) -> None:
        if self._saver.busy:
            with self._timers.measure("checkpoint_commit"):
                self._saver.settle()
            self._progress.note(**{_REFUSED: self._saver.num_refused})

    def _save_last(self) -> bool:
        """Write the last checkpoint and block until it is on disk."""
        self._progress.working("checkpoint")
        with self._context.watchdog.at_disk():
            return self._saver.save(self._step, consumed_samples=self._consumed_samples)

    def _record(self, metrics: Mapping[str, float], made: Update) -> None:
        now = time.perf_counter()
        step_s, self._step_began = now - self._step_began, now
        timers = {**self._timers.take(), "timers/step": step_s}
        idle = {f"idle/{wait}": waited_s / step_s for wait, waited_s in self._progress.take_waits().items()}
        latest = self._publish_schedule.latest
        assert latest is not None, "the first version is published before the first step"
        self._conductor.record(
            self._step,
            {
                **metrics,
                **timers,
                **idle,
                "train_rollouts/consumed_samples": self._consumed_samples,
                "train_optim/loss": made.loss,
                "train_optim/grad_norm": made.grad_norm,
                "train_optim/lr": made.lr,
                "train_optim/optim_step": self._step,
                "train_optim/skipped_steps": self._num_skipped,
                _REFUSED: self._saver.num_refused,
                **self._gpu.metrics(),
                **self._throughput(metrics, train_s=timers["timers/train"], step_s=step_s),
                "weights/version": latest.version,
                "weights/num_bytes": latest.num_bytes,
                "weights/changed_fraction": latest.changed_fraction,
            },
        )

    def _throughput(self, metrics: Mapping[str, float], *, train_s: float, step_s: float) -> dict[str, float]:
        tflop_per_s = metrics["throughput/tflop"] / train_s
        found = {
            "throughput/tokens_per_s": metrics["throughput/tokens"] / step_s,
            "throughput/samples_per_s": metrics["train_rollouts/rollout_size"] / step_s,
            "throughput/tflop_per_s": tflop_per_s,
        }
        peak = peak_flops(self._world.device)
        return found if peak is None else {**found, "throughput/mfu": tflop_per_s * 1e12 / (peak * self._world.size)}
