"""Learning curves of both peers, and the figures derived from them. Reads files; blocks on nothing.

TRL        steps.jsonl, which `peers_trl.py` writes
streamrl   the learner's metrics.jsonl, and the worker's log for the moment it could generate
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from statistics import mean

from streamrl.ops.monitor.history import History, read_lines

TRL_STEPS = "steps.jsonl"
_READY = "version_loaded"  # the log event of the worker's first weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    reward: float  # mean reward of a step's samples ...
    window: int  # ... over this many steps

    def __str__(self) -> str:
        return f"a mean reward of {self.reward:g} over {self.window} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    number: int
    at: float  # unix time of the step's end
    reward: float  # mean over its samples when they were generated
    num_samples: int
    num_tokens: int  # of their answers, without padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    began: float | None  # unix time: the model is loaded, and the first sample can be requested
    steps: tuple[Step, ...]

    def until(self, target: Target) -> Curve | None:
        """Return the curve up to the step that reaches the target; None if no step does."""
        for end in range(target.window, len(self.steps) + 1):
            if mean(step.reward for step in self.steps[end - target.window : end]) >= target.reward:
                return Curve(began=self.began, steps=self.steps[:end])
        return None

    @property
    def seconds(self) -> float:
        """Return the seconds from the beginning to the end of the last step."""
        assert self.began is not None, "a step was made, so it has begun"
        return self.steps[-1].at - self.began

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds since the beginning, reward) of each step."""
        assert self.began is not None, "a step was made, so it has begun"
        return [(round(step.at - self.began, 3), round(step.reward, 4)) for step in self.steps]

    def costs(self) -> list[tuple[float, int]]:
        """Return (seconds since the beginning, tokens of all answers) up to the end of each step."""
        tokens = accumulate(step.num_tokens for step in self.steps)
        return [(seconds, total) for (seconds, _), total in zip(self.points(), tokens, strict=True)]

    def rates(self, *, after: int) -> tuple[float, float]:
        """Return (samples, useful tokens) per second, excluding the first `after` steps."""
        assert len(self.steps) > after >= 1, "there is a step to count, and one before it to count from"
        counted = self.steps[after:]
        took_s = counted[-1].at - self.steps[after - 1].at
        return sum(s.num_samples for s in counted) / took_s, sum(s.num_tokens for s in counted) / took_s


def read_trl(folder: Path) -> Curve:
    lines = list(read_lines(folder / TRL_STEPS))
    steps = (
        Step(
            number=line["step"],
            at=line["at"],
            reward=line["reward"],
            num_samples=line["num_samples"],
            num_tokens=line["num_tokens"],
        )
        for line in lines
        if "step" in line
    )
    return Curve(began=next((line["began"] for line in lines if "began" in line), None), steps=tuple(steps))


def read_streamrl(folder: Path) -> Curve:
    """`folder`: of the run."""
    return Curve(began=next(_times_of(_READY, folder / "logs" / "worker-0.log"), None), steps=tuple(_steps(folder)))


def _steps(folder: Path) -> Iterator[Step]:
    for record in History.read(folder).steps.records:
        num_samples = round(record.values["train_rollouts/rollout_size"])
        yield Step(
            number=record.step,
            at=record.at,
            reward=record.values["train_rollouts/rewards"],
            num_samples=num_samples,
            num_tokens=round(record.values["train_rollouts/response_lengths"] * num_samples),
        )


def _times_of(event: str, log: Path) -> Iterator[float]:
    for line in read_lines(log):
        if line.get("event") == event:
            yield datetime.fromisoformat(line["timestamp"]).timestamp()
