"""The training loop, as every rank runs it.

              rank 0                                       every rank
    ┌── next plan: tickets, groups ──► broadcast ──► fetch own groups, verify ──► accept vector, all-reduced
    │                                                                                    │
    │                                    AdamW ◄── guard, clip ◄── gradients of packed micro-batches
    │                                      │
    └── settle, record ◄── checkpoint ◄── publish: a copy of every rank's own runs; the rest beside the next steps

A round is one plan. Rank 0 decides within about a second, with IDLE when there is nothing to do, so that no rank waits
for long without a reason that the monitor shows. All ranks follow the same plan under the same settings, so decisions
that depend on nothing else (publish now? checkpoint now?) need no words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from learner.checkpoints.export import export
from learner.checkpoints.save import Saver
from learner.conductor import Conductor
from learner.distributed import World
from learner.metrics.record import Timers
from learner.metrics.tally import Tally
from learner.policy.gradients import Batch, Gradients
from learner.policy.model import Speech
from learner.policy.optim import Update, learning_rate, update
from learner.policy.policy import Policy
from learner.policy.work import peak_flops
from learner.publishing.outgoing import Outgoing
from learner.publishing.publish import Publisher
from learner.replayed import Unpublished
from learner.start import Start
from learner.stream.fetch import Fetched, fetch_groups
from learner.stream.lag import oldest_trained_step
from learner.stream.plan import Kind, Plan, Verdict
from learner.watchdog import Watchdog
from streamrl.config import schema
from streamrl.errors import TrainingError
from streamrl.telemetry.progress import Progress, Wait
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import RunState
from streamrl.wire.group import Group

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop drives; all of it made before the first round."""

    config: schema.Config
    world: World
    patient: World  # the same ranks, for waiting while one of them is at the disk
    start: Start
    stream: GroupStream  # this rank reads its groups from it
    policy: Policy
    optimizer: torch.optim.Optimizer
    gradients: Gradients
    publisher: Publisher | Unpublished
    saver: Saver
    conductor: Conductor | None  # on rank 0
    speech: Speech
    progress: Progress
    timers: Timers
    watchdog: Watchdog
    stop: threading.Event  # this rank was told to end; all end together


class Loop:
    def __init__(self, parts: Parts) -> None:
        self._parts, self._config, self._world = parts, parts.config, parts.world
        self._conductor, self._progress, self._timers = parts.conductor, parts.progress, parts.timers
        self._outgoing = Outgoing(
            publisher=parts.publisher,
            max_ahead=parts.config.lag.max_steps,
            conductor=parts.conductor,
            told_to_stop=lambda: self._agree(Conductor.next_while_publishing).kind is Kind.STOP,
            progress=parts.progress,
            timers=parts.timers,
        )
        self._step = parts.start.step  # optimizer steps made
        self._consumed_samples = parts.start.consumed_samples
        self._num_skipped = self._num_skipped_in_row = 0
        self._step_began = time.perf_counter()

    def run(self) -> RunState:
        """Train until the data, the steps, the time or the operator's patience are used up."""
        ending = self._begin()
        if ending is not Kind.STOP:
            ending = self._train()
        if ending is Kind.END:
            ending = self._close()
        if not self._save():
            raise TrainingError(f"the last checkpoint could not be written to {self._config.folder}; the log says why")
        if ending is Kind.STOP:
            return "stopped"
        self._progress.working("export")
        with self._parts.watchdog.at_disk():
            export(self._parts.policy, self._parts.speech.tokenizer, self._config, self._parts.patient)
        return "finished"

    # The three acts

    def _begin(self) -> Kind:
        """No ticket goes out before workers can have weights and "before" has been measured."""
        if self._publish_at_last() is Kind.STOP:
            return Kind.STOP
        fresh = self._parts.start.checkpoint is None
        return self._validate() if fresh and self._config.validation.at_start else Kind.END

    def _train(self) -> Kind:
        while True:
            self._outgoing.settle()
            # Workers that cannot have younger weights would answer with tokens that are too old.
            keeps_up = self._outgoing.keeps_up(self._step)
            plan = self._agree(Conductor.next_plan if keeps_up else Conductor.next_without_a_step)
            match plan.kind:
                case Kind.STEP:
                    self._train_on(plan)
                case Kind.IDLE:
                    self._outgoing.retry(self._step)
                case Kind.COMMIT:
                    self._save()
                case Kind.PUBLISH:
                    self._outgoing.send_whole(self._step)
                case _:
                    return plan.kind

    def _close(self) -> Kind:
        """Workers get the last weights, and show how good they are."""
        if not self._outgoing.wait():
            return Kind.STOP
        latest = self._outgoing.latest
        if (latest is None or latest.step != self._step) and self._publish_at_last() is Kind.STOP:
            return Kind.STOP
        return self._validate() if self._config.validation.at_end else Kind.END

    def _validate(self) -> Kind:
        """Of the newest version, after what may still run beside training: that is of an older one."""
        if self._await_answers() is Kind.STOP:
            return Kind.STOP
        if self._conductor is not None:
            self._conductor.start_validation(self._outgoing.latest)
        return self._await_answers()

    def _await_answers(self) -> Kind:
        """END when no validation runs any more, STOP when told to stop before."""
        while (plan := self._agree(Conductor.next_while_validating)).kind is Kind.IDLE:
            pass
        return plan.kind

    def _publish_at_last(self) -> Kind:
        """Publish, again and again if need be; END when done, STOP when told to stop before."""
        while not self._outgoing.send(self._step):
            if self._agree(Conductor.next_after_pause).kind is Kind.STOP:
                return Kind.STOP
        return Kind.END

    def _agree(self, decide: Callable[[Conductor, int], Plan]) -> Plan:
        """Rank 0 decides, all follow."""
        self._parts.watchdog.beat()
        if self._conductor is not None:
            plan = decide(self._conductor, self._step)
            self._world.broadcast(plan.to_array())
            return plan
        with self._progress.waiting(Wait.PEERS):
            return Plan.from_array(self._world.broadcast(None))

    # One step

    def _train_on(self, plan: Plan) -> None:
        self._progress.working("train")
        fetched, verdicts = self._fetch(plan)
        tally = self._tally()
        tally.add_masked(fetched.num_masked)
        made = self._learn(fetched.groups, tally) if Verdict.SOUND in verdicts else []
        applied = [one for one in made if one.applied]
        if self._conductor is not None:
            self._conductor.settle(plan, verdicts, trained=bool(applied))
        if made:
            self._guard(made[-1])
        if not applied:
            return
        self._step += 1
        if self._step % self._config.weights.publish_every == 0:
            self._outgoing.send_beside(self._step)
        self._validate_beside()
        metrics = tally.metrics(self._world)
        self._consumed_samples += int(metrics["train_rollouts/rollout_size"])
        if self._step % self._config.checkpoint.every_steps == 0:
            self._save()
        self._record(metrics, applied[-1])
        self._progress.advanced(step=self._step)

    def _fetch(self, plan: Plan) -> tuple[Fetched, list[Verdict]]:
        """(what this rank found, the verdicts on all groups of the plan)"""
        fetched = fetch_groups(
            self._parts.stream,
            plan,
            rank=self._world.rank,
            vocabulary=self._parts.speech.vocabulary,
            oldest_step=oldest_trained_step(self._config.lag, plan.step),
        )
        told = float(self._parts.stop.is_set())
        *verdicts, num_told = self._world.total(np.append(fetched.verdicts, told))
        if num_told:  # of whichever machine: rank 0 ends all with its next plan
            self._parts.stop.set()
        return fetched, [Verdict(int(verdict)) for verdict in verdicts]

    def _learn(self, groups: Sequence[Group], tally: Tally) -> list[Update]:
        """An update for each pass over the batch; none after one that had to be skipped."""
        made: list[Update] = []
        with self._timers.measure("train"), self._parts.watchdog.computing():
            with self._timers.measure("init_logprobs"):
                batch = self._parts.gradients.prepare(groups, tally)
            while len(made) < self._config.algorithm.reinforce_epochs and (not made or made[-1].applied):
                made.append(self._pass(batch, tally))
        return made

    def _pass(self, batch: Batch, tally: Tally) -> Update:
        settings, start = self._config.optimizer, self._parts.start
        with self._timers.measure("logprobs"):
            loss = self._parts.gradients.accumulate(batch, tally)
        return update(
            self._parts.optimizer,
            loss=loss,
            lr=learning_rate(self._step - start.first_step, settings, total_steps=start.total_steps),
            clip_norm=settings.clip_norm,
            world=self._world,
        )

    def _guard(self, made: Update) -> None:
        """All ranks count alike, so all of them stop alike."""
        if made.applied:
            self._num_skipped_in_row = 0
            return
        self._num_skipped += 1
        self._num_skipped_in_row += 1
        log.warning("step skipped", step=self._step, loss=made.loss, grad_norm=made.grad_norm)
        if self._num_skipped_in_row >= self._config.training.max_skipped_in_row:
            raise TrainingError(
                f"{self._num_skipped_in_row} steps in a row had a loss or gradient that is not finite "
                f"(training.max_skipped_in_row); the last checkpoint is sound: try a smaller optimizer.lr"
            )

    def _validate_beside(self) -> None:
        """Ask now and then how good the newest weights are; training goes on meanwhile."""
        every = self._config.validation.every_steps
        if self._conductor is not None and every and self._step % every == 0:
            self._conductor.validate_beside(self._step, self._outgoing.latest)

    def _save(self) -> bool:
        self._progress.working("checkpoint")
        with self._parts.watchdog.at_disk(), self._timers.measure("checkpoint"):
            return self._parts.saver.save(
                self._step, version_n=self._outgoing.last_n, consumed_samples=self._consumed_samples
            )

    def _tally(self) -> Tally:
        return Tally(sources=tuple(self._config.rewards), step=self._step, is_dead=self._parts.start.is_dead)

    def _record(self, metrics: Mapping[str, float], made: Update) -> None:
        now = time.perf_counter()
        step_s, self._step_began = now - self._step_began, now
        timers = {**self._timers.take(), "timers/step": step_s}
        idle = {f"idle/{wait}": waited_s / step_s for wait, waited_s in self._progress.take_waits().items()}
        if self._conductor is None:
            return
        latest = self._outgoing.latest
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
