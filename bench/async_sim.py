"""Simulates a run: generation, rewards and learner take randomly drawn times; nothing waits for a real clock.

    issue (lag + 1 batches are out) ─► slots of the generating GPUs, FIFO, one slot per sample
          ▲                                └─► group done: after its longest sample, and the reward
          └── step: train the batch that finished first ◄──┘

With lag 0 nothing is generated while the learner trains. Samples in flight continue under new weights, as in workers.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

_WARM_UP = 5  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The workload and its latencies. The defaults are assumptions, modelled on published reasoning-RL runs."""

    groups_per_step: int
    num_samples: int = 8  # per group
    median_tokens: float = 3_000.0  # of a response: log-normal, truncated at the longest
    spread: float = 0.8  # sigma of the log-normal: one response in a hundred is six times as long as the median
    longest_tokens: float = 16_384.0
    reward_median_s: float = 1.0  # log-normal: running code, or asking a model
    reward_spread: float = 1.0
    tokens_per_s: float = 50.0  # decoding speed of one response, independent of the batch
    slots_a_gpu: int = 64  # concurrent responses per GPU
    trained_per_s: float = 3_400.0  # tokens per training GPU
    publish_s: float = 2.0  # before the next step
    switch_s: float = 10.0  # between generating and training, if the same GPUs do both

    def tokens(self, chance: random.Random) -> float:
        return min(self.longest_tokens, chance.lognormvariate(math.log(self.median_tokens), self.spread))

    def reward_s(self, chance: random.Random) -> float:
        return chance.lognormvariate(math.log(self.reward_median_s), self.reward_spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    samples_per_s: float
    generating: float  # busy fraction of the slots
    training: float  # busy fraction of the learner
    lag_mean: float  # steps from issue to training
    lag_max: int


def apart(load: Load, *, generating: int, training: int, lag: int, num_steps: int, seed: int = 1) -> Pace:
    """Simulate some GPUs generating and others training."""
    run = _Run(load, slots=generating * load.slots_a_gpu, seed=seed)
    trained_per_s = training * load.trained_per_s
    for step in range(num_steps + _WARM_UP):
        if step == _WARM_UP:
            run.begin_to_count()
        run.issue((lag + 1) * load.groups_per_step - len(run.out), step=step)
        run.train_batch(step=step, trained_per_s=trained_per_s, pause_s=load.publish_s)
    return run.pace(num_steps)


def together(load: Load, *, gpus: int, num_steps: int, seed: int = 1) -> Pace:
    """Simulate all GPUs generating, then all training."""
    run = _Run(load, slots=gpus * load.slots_a_gpu, seed=seed)
    for step in range(num_steps + _WARM_UP):
        if step == _WARM_UP:
            run.begin_to_count()
        run.issue(load.groups_per_step, step=step)
        run.train_batch(step=step, trained_per_s=gpus * load.trained_per_s, pause_s=load.switch_s)
    return run.pace(num_steps)


class _Run:
    def __init__(self, load: Load, *, slots: int, seed: int) -> None:
        self._load, self._chance = load, random.Random(seed)
        self._free_at = [0.0] * slots  # a heap
        self.out: list[tuple[float, int, float]] = []  # heap of groups: (finish time, issue step, tokens)
        self._now = self._begun_at = self._busy_s = self._trained_s = 0.0
        self._lags: list[int] = []

    def begin_to_count(self) -> None:
        self._begun_at, self._busy_s, self._trained_s = self._now, 0.0, 0.0
        self._lags.clear()

    def issue(self, count: int, *, step: int) -> None:
        for _ in range(count):
            ends, total = [], 0.0
            for _ in range(self._load.num_samples):
                tokens = self._load.tokens(self._chance)
                takes_s = tokens / self._load.tokens_per_s
                end = max(self._now, self._free_at[0]) + takes_s
                heapq.heapreplace(self._free_at, end)
                ends.append(end)
                self._busy_s += takes_s
                total += tokens
            heapq.heappush(self.out, (max(ends) + self._load.reward_s(self._chance), step, total))

    def train_batch(self, *, step: int, trained_per_s: float, pause_s: float) -> None:
        batch = [heapq.heappop(self.out) for _ in range(self._load.groups_per_step)]
        takes_s = sum(tokens for _, _, tokens in batch) / trained_per_s
        self._now = max(self._now, batch[-1][0]) + takes_s + pause_s
        self._trained_s += takes_s
        self._lags += [step - issued for _, issued, _ in batch]

    def pace(self, num_steps: int) -> Pace:
        elapsed_s = self._now - self._begun_at
        return Pace(
            samples_per_s=num_steps * self._load.groups_per_step * self._load.num_samples / elapsed_s,
            # Work that started before the window and work that continues after it roughly cancel out.
            generating=min(1.0, self._busy_s / (len(self._free_at) * elapsed_s)),
            training=self._trained_s / elapsed_s,
            lag_mean=sum(self._lags) / len(self._lags),
            lag_max=max(self._lags),
        )
