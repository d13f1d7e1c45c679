"""What each rank does in test_slow_disk: a replay in which rank 0 is at its disk for longer than the loop's collectives
wait. Run by torchrun.

python -m tests.integration.slow_disk_rank FOLDER    FOLDER/runs/again/config.yaml and FOLDER/recording exist
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch

from streamrl.config.load import load_config
from streamrl.crashpoints import Point, armed
from streamrl.learner.process.ranks import join_world
from streamrl.learner.replay import replay

_LOOP_WAITS_S = 5.0
_SLOW_S = 8.0


def slowly(point: Point) -> None:
    if point in ("term.recorded", "checkpoint.synced"):  # digests have been read; they have been written
        threading.Event().wait(_SLOW_S)


def work(folder: Path) -> None:
    config = load_config(folder / "runs" / "again" / "config.yaml").config
    with join_world(os.environ, timeout_s=240) as joined:
        world = joined.with_own_group(timeout_s=_LOOP_WAITS_S)
        with armed(slowly) if world.is_main else nullcontext():
            state = replay(
                config=config,
                folder=folder / "recording",
                world=world,
                stop=threading.Event(),
                environment=os.environ,
            )
        assert state == "finished", state


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
