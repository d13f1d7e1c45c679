"""The settings that the peers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench import peers_task

NUM_CORES = 2
_TASK = Path(peers_task.__file__).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Identical for both peers."""

    model: Path
    groups_per_step: int = 16
    num_samples: int = 8
    lr: float = 1e-4  # at 5e-4 the reward oscillates; at 2e-4 all is learned in 50 steps, of which starts are a third
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = 0.0  # off: it would affect losses that differ by a factor differently
    max_steps: int = 400
    snapshot_every: int = 20  # steps; both save their weights, which are graded after the run
    longest: int = peers_task.LONGEST  # tokens per answer
    reward: Path = _TASK  # a module with a function `reward`, which imports nothing of ours

    @property
    def num_prompts(self) -> int:
        return self.groups_per_step * self.max_steps

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.num_samples
