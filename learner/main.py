"""One learner rank, under torchrun (`process.agent`) or alone: `python -m streamrl.learner --config ...`.

With `--replay DIR` instead of `--redis URL` it trains from a recording.

Exit codes: 0 finished, or stopped by the operator or by `training.max_time`; 2 a user's mistake, or another learner
owns the run; 76 ended by a signal under torchrun; 1 anything else. Torchrun restarts the ranks after the last two,
unless torchrun itself is ending. Where a restart would only fail again, the rank makes torchrun exit with its code.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import structlog
import torch

from streamrl.config.load import load_config
from streamrl.errors import StreamrlError
from streamrl.learner.admission.server import was_restarted
from streamrl.learner.assemble import learn
from streamrl.learner.checkpoints.resume import check_resume
from streamrl.learner.process.failing import is_permanent, sharing_failures, write_error
from streamrl.learner.process.guardian import guarded
from streamrl.learner.process.job import EXIT_ON_SIGNAL, agent_ends, end_at_once_on_sigterm, write_verdict
from streamrl.learner.process.ranks import World, die_with_parent, end_if_joined, join_world, show_rank
from streamrl.learner.process.stop_flag import StopFlag
from streamrl.learner.rank_context import stall_limit_s
from streamrl.learner.replay import replay
from streamrl.process import threads_in
from streamrl.protocol.transport.types import RunState
from streamrl.telemetry.logs import configure_logging

_STOPPED_LIMIT_S = 10.0  # limit for a rank stopped from outside (SIGSTOP); longer than a debugger's look at a process

log = structlog.get_logger("learner")


def main(arguments: Sequence[str] | None = None) -> int:
    parent = os.getppid()
    options = _parse(arguments)
    rank = os.environ.get("RANK", "0")
    log_file = options.log_file and Path(str(options.log_file).replace("{rank}", rank))
    configure_logging(f"learner/{rank}", log_file)
    under_agent = "TORCHELASTIC_RUN_ID" in os.environ
    stop = StopFlag()
    if under_agent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing to finish until this rank has joined the others
        die_with_parent(parent)
        show_rank(rank)
    try:
        with guarded(limit_s=_STOPPED_LIMIT_S) if under_agent else nullcontext():
            state = _run(options, stop, agent=_agent(parent) if under_agent else None)
    except StreamrlError as error:
        permanent = is_permanent(error, standby=options.standby)
        log.error(str(error), exc_info=not permanent)
        if permanent and options.error_file:
            write_error(options.error_file, error, rank=int(rank))
        ends_agent = permanent and under_agent and write_verdict(error.exit_code, os.environ)
        if ends_agent or (rank == "0" and not (permanent and under_agent)):  # once for all ranks
            print(f"learner: {error}", file=sys.stderr, flush=True)
        if ends_agent:  # else torchrun would restart the ranks, up to max-restarts times
            os.kill(_agent(parent), signal.SIGTERM)
        end_if_joined(error.exit_code)
        if error.exit_code != 0:
            return error.exit_code
        state = "stopped"
    except Exception as error:
        end_if_joined(1, error)
        raise
    was_signalled = stop.is_set() or state == "running"  # this rank or another one got a signal
    if under_agent and not was_signalled:
        end_at_once_on_sigterm()
        was_signalled = stop.is_set()  # a signal may have come since the check above
    return EXIT_ON_SIGNAL if under_agent and was_signalled else 0


def _agent(parent: int) -> int:
    """The agent's process id; a fork server may stand between the agent and this process."""
    above = multiprocessing.parent_process()
    return parent if above is None or above.pid is None else above.pid


def _run(options: argparse.Namespace, stop: threading.Event, *, agent: int | None) -> RunState:
    """Train, and return the state the run is left in. A signal to this rank sets `stop`."""
    config = load_config(options.config).config
    if agent is None:  # under the agent, its starter has already checked
        check_resume(config)
    if threads := config.learner.threads or threads_in(os.environ):
        torch.set_num_threads(threads)
    rank = int(os.environ.get("RANK", "0"))
    with (
        join_world(os.environ, timeout_s=stall_limit_s(config), gpu_memory=options.gpu_memory) as all_ranks,
        sharing_failures(rank=rank, standby=options.standby),
    ):
        world = all_ranks.under(config.learner.layout)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        if options.replay is not None:
            state = replay(config=config, folder=options.replay, world=world, stop=stop, environment=os.environ)
        else:
            state = learn(
                config=config,
                url=options.redis,
                # Only at the first start: a learner that was itself replaced must not take the run back when torchrun
                # restarts it.
                takeover=options.takeover and not was_restarted(os.environ),
                standby=options.standby,
                world=world,
                stop=stop,
                elastic=options.elastic,
                environment=os.environ,
            )
        if agent is not None and state != "finished" and not options.elastic and world.size > world.local_size:
            _end_on_all_machines(world, agent)
        log.info("learner ended", state=state)
    return state


def _end_on_all_machines(world: World, agent: int) -> None:
    """End this machine's agent if that of another one was told to end. A collective.

    It would restart its ranks, and wait for the other machine. Not in an elastic learner, which goes on.
    """
    own_ends = agent_ends(os.environ)
    if not world.largest(np.array([float(own_ends)]))[0]:
        return
    if not own_ends and write_verdict(0, os.environ):
        print("learner: ending with another machine, which was told to end", file=sys.stderr, flush=True)
        os.kill(agent, signal.SIGTERM)
    world.barrier()  # the machine where agents meet must not go first


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m streamrl.learner", description="One rank of a run's learner.")
    parser.add_argument("--config", required=True, type=Path, help="the run's resolved configuration")
    parser.add_argument("--own-config", action="store_true", help="that file is for this agent, which removes it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--redis", metavar="URL", help="Redis server with the run's stream")
    source.add_argument("--replay", metavar="DIR", type=Path, help="train from this recording, without Redis")
    parser.add_argument("--takeover", action="store_true", help="replace a learner that still holds the run")
    parser.add_argument("--standby", action="store_true", help="wait for as long as another learner holds the run")
    parser.add_argument("--elastic", action="store_true", help="on a signal, leave the run to other machines")
    parser.add_argument("--gpu-memory", type=float, help="share of its GPU's memory that this rank may use")
    parser.add_argument("--log-file", type=Path, help="write logs here as JSON lines; {rank} becomes the rank")
    parser.add_argument("--error-file", type=Path, help="write an error that no restart can fix here, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
