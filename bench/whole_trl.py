"""TRL's RLOO trainer on the same model and prompts: core-seconds of a few of its steps.

Uses TRL's fastest settings for two cores (`bench.peers_trl_side`). Counted like the run: from the moment the first
sample can be requested to the end of the last step, without start-up.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bench.descendants import Spent
from bench.peers_curve import Curve, read_trl
from bench.peers_terms import Terms
from bench.peers_trl_side import BEST, trl_command
from streamrl.errors import ResourceError
from streamrl.ops.launch.processes import Process, end_all

_LOOK_EVERY_S = 0.5
_LIMIT_S = 600.0
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRan:
    seconds: float
    core_s: float
    made: int  # tokens
    trained: int  # tokens, prompts included and padding excluded


def run_trl(python: Path, terms: Terms, *, bf16: bool, prompt_tokens: int, prompts: Path, folder: Path) -> TrlRan:
    """Run `terms.max_steps` steps."""
    folder.mkdir()
    process = Process(trl_command(python, replace(BEST, bf16=bf16), terms, prompts, folder, seed=0))
    try:
        core_s, curve = _watched(process, folder, terms)
    finally:
        end_all([process], within_s=_LEAVE_S)
    made = sum(step.num_tokens for step in curve.steps)
    num_prompt_tokens = prompt_tokens * sum(step.num_samples for step in curve.steps)
    return TrlRan(seconds=curve.seconds, core_s=core_s, made=made, trained=made + num_prompt_tokens)


def _watched(process: Process, folder: Path, terms: Terms) -> tuple[float, Curve]:
    """Return the core-seconds from its beginning to its last step, and its steps."""
    spent, ends = Spent(os.getpid()), time.time() + _LIMIT_S
    before: float | None = None
    while time.time() < ends:
        code = process.poll()  # before reading its file, to include what it wrote last
        now, curve = sum(spent.look().values()), read_trl(folder)
        if before is None and curve.began is not None:
            before = now
        if before is not None and len(curve.steps) >= terms.max_steps:
            return now - before, curve
        if code is not None:
            last_lines = "\n".join(process.last_words())
            raise ResourceError(f"TRL ended ({code}) after {len(curve.steps)} steps:\n{last_lines}")
        time.sleep(_LOOK_EVERY_S)
    raise ResourceError(f"TRL made fewer than {terms.max_steps} steps within {_LIMIT_S:.0f} s; {process.command.log}")
