"""How each loss handles samples of a given age, on a task where plain REINFORCE visibly fails.

    trials (loss x lag x seed, saved in runs/bench as they finish) ─► difference from on-policy, seed by seed ─► bars

The losses are the learner's own, in a loop where every sample has exactly that age (bench.staleness_task). An
interrupted bench resumes with the missing trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.measure import Say
from bench.plot import draw_curves
from bench.report import Bar, Fact, Line
from bench.resume import Done, commit_of
from bench.staleness_task import Task, Trial, run_trial
from streamrl.config import schema

UNCORRECTED = "none"
_LOSSES = ("truncated", "tis", "icepop", UNCORRECTED)
_LAGS = (0, 4, 8, 32)
_TOLERATED = {8: 0.02, 32: 0.05}  # of the on-policy reward, or two standard errors if larger
_VISIBLY = 0.2  # of the on-policy reward
_FOLDER = Path("runs/bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    mean: float
    error: float  # standard error of the mean

    @staticmethod
    def of(values: npt.NDArray[np.float64]) -> Estimate:
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
        return Estimate(mean=float(values.mean()), error=float(error))


class Trials:
    """The trials of all seeds, by loss and lag."""

    def __init__(self, found: Mapping[tuple[str, int], Sequence[Trial]]) -> None:
        self._found = found

    def finals(self, loss: str, lag: int) -> npt.NDArray[np.float64]:  # [seeds]
        return np.array([trial.final for trial in self._found[loss, lag]])

    def mean(self, loss: str, lag: int, what: str) -> float:
        return float(np.mean([getattr(trial, what) for trial in self._found[loss, lag]]))

    def shortfall(self, loss: str, lag: int) -> Estimate:
        """Return the mean reward lost relative to the same loss on-policy, paired by seed."""
        fresh = self.finals(loss, 0)
        return Estimate.of((fresh - self.finals(loss, lag)) / fresh.mean())


def bench(*, quick: bool, say: Say) -> list[Line]:
    torch.set_num_threads(1)  # the matrices are too small for more threads
    task = replace(Task(), num_steps=120) if quick else Task()
    seeds = range(2) if quick else range(5)
    done = Done(_FOLDER / f"staleness{'-quick' if quick else ''}.jsonl", of=f"{commit_of(Path('.'))} {task}")
    found: dict[tuple[str, int], list[Trial]] = {}
    for loss in _LOSSES:
        for lag in _LAGS:
            names = [f"{loss} {lag} {seed}" for seed in seeds]
            for seed, name in zip(seeds, names, strict=True):
                if name not in done:
                    done.add(name, asdict(run_trial(task, loss=loss, lag=lag, seed=seed)))
            found[loss, lag] = [Trial(**done[name]) for name in names]
            say(f"{loss}, lag {lag}: {np.mean([trial.final for trial in found[loss, lag]]):.3f}")
    done.complete()
    trials = Trials(found)
    curves = {loss: [(lag, trials.mean(loss, lag, "final")) for lag in _LAGS] for loss in _LOSSES}
    say(draw_curves(_FOLDER / "staleness.png", curves, x="age of the samples, steps", y="reward in the end"))
    return [*_bars(trials), *_table(trials)]


def _bars(trials: Trials) -> Iterator[Line]:
    default = schema.Algorithm().loss
    for lag, tolerated in _TOLERATED.items():
        short = trials.shortfall(default, lag)
        name, goal = f"{default}, lag {lag}: short of on-policy", 100 * max(tolerated, 2 * short.error)
        yield Bar(name=name, value=100 * short.mean, unit="%", goal=goal, better="lower")
    most = max(_LAGS)
    short = trials.shortfall(UNCORRECTED, most)
    name = f"{UNCORRECTED}, lag {most}: short of on-policy (it must fail)"
    yield Bar(name=name, value=100 * short.mean, unit="%", goal=100 * _VISIBLY, better="higher")
    for loss in _LOSSES:
        if loss not in (default, UNCORRECTED):
            ours = trials.finals(default, most)
            more = Estimate.of((trials.finals(loss, most) - ours) / ours.mean())
            name, goal = f"{loss}, lag {most}: beyond {default}", 100 * max(_TOLERATED[8], 2 * more.error)
            yield Bar(name=name, value=100 * more.mean, unit="%", goal=goal, better="lower")


def _table(trials: Trials) -> Iterator[Line]:
    for loss in _LOSSES:
        for lag in _LAGS:
            name, reward = f"{loss}, lag {lag}", Estimate.of(trials.finals(loss, lag))
            yield Fact(name=f"{name}: reward", value=reward.mean, unit="")
            yield Fact(name=f"{name}: standard error of it", value=reward.error, unit="")
            yield Fact(name=f"{name}: unrest, last third", value=trials.mean(loss, lag, "unrest"), unit="")
            yield Fact(name=f"{name}: entropy in the end", value=trials.mean(loss, lag, "entropy"), unit="nats")
