"""torchrun with ranks that start at once: `python -m streamrl.learner.process.agent TORCHRUN_OPTIONS -- OPTIONS`.

    agent (torchrun's own) ──► fork server: torch, transformers, all of learner imported, once
                                    │ fork, a few milliseconds
                                    ├──► rank 0
                                    └──► rank 1     after a death: all of them again

A rank started as a new program spends seconds on imports, all ranks of a machine at once; after a death that is most of
the run's downtime. torchrun's options, rendezvous, restarts and exit codes are unchanged, except for four. On a signal
the agent shuts down cleanly at any moment (`ending`), with exit code 0, or with 76 if it leaves the run to other
machines (`--elastic`) and is to come back. If a rank reports that no restart would help, the agent exits with that
rank's code (`job`). A machine that joins or leaves takes neither the step in progress nor a restart, and an hour
without a failure gives all restarts back (`elastic_agent`).

torchrun and multiprocessing leave files and sockets in the temporary folder. So the agent has its own
(`streamrl.held_folders`), removed when it ends; in memory, since torch's store in a file loops for ever once a full
disk has cut one of its writes off. Its ranks use the common one. It also removes its ranks' configuration, if that was
written for it alone (`--own-config`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

from streamrl.forked_server import forking_server
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.ending import Ending
from streamrl.learner.process.job import EXIT_ON_SIGNAL, note_job_began, prepare_verdict
from streamrl.process import read_by_torch

_RANK = Path(__file__).parents[1] / "__main__.py"
# Everything a rank needs, then the server's own setup.
PRELOADED = ["streamrl.learner.main", "streamrl.learner.process.fork_server"]
_SEPARATOR = "--"
_AFTER_MULTIPROCESSING = -200  # multiprocessing removes its own files at -100
_GRACE_S = 30  # torchrun's default


def main(arguments: Sequence[str], *, torchrun: Callable[[list[str]], object] | None = None) -> None:
    """Run the agent. `torchrun` defaults to torch's."""
    if _SEPARATOR not in arguments:
        sys.exit(f"usage: python -m streamrl.learner.process.agent TORCHRUN_OPTIONS {_SEPARATOR} LEARNER_OPTIONS")
    split = list(arguments).index(_SEPARATOR)
    options, ranks = arguments[:split], arguments[split + 1 :]
    note_job_began(os.environ)
    if "--own-config" in ranks:
        file = Path(ranks[list(ranks).index("--config") + 1])
        Finalize(None, partial(file.unlink, missing_ok=True), exitpriority=_AFTER_MULTIPROCESSING)
    grace_s, is_elastic = _grace_s(options), "--elastic" in ranks
    ending = Ending(
        grace_s=grace_s,
        verdict=prepare_verdict(_keep_temporary_files_apart(), os.environ),
        clean_exit_code=EXIT_ON_SIGNAL if is_elastic else 0,
    )
    # torchrun insists on handling some signal; this agent handles those that ask it to end.
    own = ["--start-method=forkserver", "--run-path", "--signals-to-handle=SIGQUIT"]
    with ending.handling_signals():
        os.environ.update(read_by_torch(os.environ))
        _start_fork_server()
        (torchrun or partial(_torchrun, grace_s=grace_s, may_leave=is_elastic))([*own, *options, str(_RANK), *ranks])


def _start_fork_server() -> None:
    """Start the ranks' fork server, which imports while torchrun itself does. An agent that was itself forked from a
    process with these imports forks the server too."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with forking_server(PRELOADED[:1]):
        multiprocessing.forkserver.ensure_running()


def _torchrun(arguments: list[str], *, grace_s: float, may_leave: bool) -> None:
    from torch.distributed import run  # takes seconds; signals are already handled meanwhile

    from streamrl.learner.process.elastic_agent import make_torchrun_use_it

    make_torchrun_use_it(grace_s=grace_s, may_leave=may_leave)
    run.main(arguments)


def _grace_s(options: Sequence[str]) -> float:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", type=float, default=_GRACE_S)
    grace_s: float = parser.parse_known_args(options)[0].shutdown_timeout
    return grace_s


def _keep_temporary_files_apart() -> Path:
    """Use the returned folder for temporary files until this process ends."""
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder(in_memory=True))
    tempfile.tempdir = str(folder)
    Finalize(None, stack.close, exitpriority=_AFTER_MULTIPROCESSING)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
