"""What each rank does in test_checkpoint_beside: a replay in which one rank dies beside the loop. Run by torchrun.

python -m tests.integration.checkpoint_rank FOLDER RUN [RANK POINT]   with FOLDER/runs/RUN/config.yaml, FOLDER/recording
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from streamrl.config.load import load_config
from streamrl.crashpoints import Point, armed
from streamrl.learner.process.ranks import join_world
from streamrl.learner.replay import replay
from tests.helpers import wait_until
from tests.integration.learner_world import lines


def die_at(point: str, metrics: Path) -> Callable[[Point], None]:
    """Once the loop has made another step than the one that was copied."""

    def act(passed: Point) -> None:
        if passed == point:
            before = len(lines(metrics))
            wait_until(lambda: len(lines(metrics)) >= before + 2, description="the loop goes on", timeout_s=240)
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def work(folder: Path, run: str, *death: str) -> None:
    config = load_config(folder / "runs" / run / "config.yaml").config
    rank, point = death or ("none", "")
    with join_world(os.environ, timeout_s=240) as world:
        with armed(die_at(point, config.folder / "metrics.jsonl")) if rank == str(world.rank) else nullcontext():
            state = replay(
                config=config, folder=folder / "recording", world=world, stop=threading.Event(), environment=os.environ
            )
        assert state == "finished", state


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]), *sys.argv[2:])
