"""torchrun, with ranks that start at once: `python -m learner.agent TORCHRUN_OPTIONS -- LEARNER_OPTIONS`.

    agent (torchrun's own) ──► fork server: torch, transformers, all of learner imported, once
                                    │ fork, a few milliseconds
                                    ├──► rank 0
                                    └──► rank 1     after a death: all of them again

A rank that is started as a new program imports for seconds, all ranks of a machine at the same time; after a death that
is most of what the run waits for. torchrun's options, rendezvous, restarts and exit codes are as they are.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run

_RANK = Path(__file__).with_name("__main__.py")
_SEPARATOR = "--"


def main(arguments: Sequence[str]) -> None:
    if _SEPARATOR not in arguments:
        sys.exit(f"usage: python -m learner.agent TORCHRUN_OPTIONS {_SEPARATOR} LEARNER_OPTIONS")
    split = list(arguments).index(_SEPARATOR)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["learner.nursery"])
    forked = ["--start-method=forkserver", "--run-path", *arguments[:split]]
    run.main([*forked, str(_RANK), *arguments[split + 1 :]])


if __name__ == "__main__":
    main(sys.argv[1:])
