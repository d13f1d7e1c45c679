"""torchrun's agents and their ranks, observed from outside: their processes and their progress."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from streamrl.config import schema
from tests.helpers import wait_until
from tests.integration.learner_world import lines

PATIENCE_S = 150.0


def ranks(agent: subprocess.Popen[str], *, number: int) -> list[int]:
    """Return the processes that the agent has started, in the order of ranks, once all exist."""

    def all_there() -> list[int]:
        found = named_ranks(agent.pid)
        return [found[rank] for rank in sorted(found)] if len(found) == number else []

    return wait_until(all_there, description=f"{number} ranks", timeout_s=PATIENCE_S)


def named_ranks(agent: int) -> dict[int, int]:
    """Return the process of each rank that has joined."""
    words = {pid: _name(pid).partition("rank-")[2] for pid in descendants(agent)}
    return {int(word): pid for pid, word in words.items() if word.isdecimal()}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has just ended
        return ""


def descendants(pid: int) -> list[int]:
    """Return the process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(below for child in children for below in descendants(int(child)))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def term_at_work(config: schema.Config) -> int:
    """Return the term of the last recorded step; 0 before the first."""
    made = lines(config.folder / "metrics.jsonl")
    return int(made[-1]["term"]) if made else 0


def last_step(config: schema.Config) -> int:
    made = lines(config.folder / "metrics.jsonl")
    return int(made[-1]["step"]) if made else 0


def await_steps(config: schema.Config, *, beyond_term: int = 0, description: str) -> None:
    wait_until(lambda: term_at_work(config) > beyond_term, description=f"{description}", timeout_s=PATIENCE_S)


def end(agent: subprocess.Popen[str]) -> None:
    """End it in order, so that everything is committed."""
    agent.send_signal(signal.SIGTERM)
    agent.wait(PATIENCE_S)


def num_made(config: schema.Config) -> int:
    """Count the steps, repeated ones too."""
    return len(lines(config.folder / "metrics.jsonl"))


def wasted_steps(config: schema.Config) -> int:
    made = [record["step"] for record in lines(config.folder / "metrics.jsonl")]
    return len(made) - len(set(made))
