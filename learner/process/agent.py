"""torchrun, with ranks that start at once: `python -m streamrl.learner.process.agent TORCHRUN_OPTIONS -- OPTIONS`.

    agent (torchrun's own) ──► fork server: torch, transformers, all of learner imported, once
                                    │ fork, a few milliseconds
                                    ├──► rank 0
                                    └──► rank 1     after a death: all of them again

A rank that is started as a new program imports for seconds, all ranks of a machine at the same time; after a death that
is most of what the run waits for. torchrun's options, rendezvous, restarts and exit codes are as they are, but where a
rank says that no restart would help: then the agent ends with that rank's code (`learner.process.ranks`).

torchrun and multiprocessing keep files and sockets in the folder for temporary files, and leave some of them there: the
agent has one of its own (`streamrl.files`), which goes with it. Its ranks use the common one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.util import Finalize
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException

from streamrl.files import scratch_folder
from streamrl.learner.process.ranks import heard, listen, note_job_began

_RANK = Path(__file__).parents[1] / "__main__.py"
# All that a rank needs, then how the server behaves.
PRELOADED = ["streamrl.learner.main", "streamrl.learner.process.fork_server"]
_SEPARATOR = "--"
_AFTER_MULTIPROCESSING = -200  # which removes what is its own at -100


def main(arguments: Sequence[str]) -> None:
    if _SEPARATOR not in arguments:
        sys.exit(f"usage: python -m streamrl.learner.process.agent TORCHRUN_OPTIONS {_SEPARATOR} LEARNER_OPTIONS")
    split = list(arguments).index(_SEPARATOR)
    note_job_began(os.environ)
    told = listen(_keep_temporary_files_apart(), os.environ)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forked = ["--start-method=forkserver", "--run-path", *arguments[:split]]
    try:
        run.main([*forked, str(_RANK), *arguments[split + 1 :]])
    except SignalException:
        if (code := heard(told)) is None:
            raise
        sys.exit(code)


def _keep_temporary_files_apart() -> Path:
    """In the folder that is returned, from here to the end of this process."""
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder())
    tempfile.tempdir = str(folder)
    Finalize(None, stack.close, exitpriority=_AFTER_MULTIPROCESSING)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
