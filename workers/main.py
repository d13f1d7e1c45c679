"""Entry point of a worker: command line, logging, signals, exit code. `streamrl worker`, or in a checkout `python -m
workers`."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import structlog

from streamrl.errors import StreamrlError
from streamrl.permissions import Permissions
from streamrl.process import signals_to_end
from streamrl.protocol.transport.address import URL_VARIABLE
from streamrl.telemetry.logs import configure_logging

log = structlog.get_logger(__name__)

_THREADS = 256  # an upper limit: threads start on demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a worker is told on its command line."""

    redis_url: str
    run: str
    worker: str  # unique to this worker
    permissions: Permissions
    model: str | None = None  # overrides the run's
    join: str | None = None  # HOST:PORT of an engine's first host, to join it as a further host
    hosts: str = "0.0.0.0:9600"  # HOST:PORT where further hosts join its engine, if the run has any
    local_reward_url: str | None = None
    http: str | None = None  # HOST:PORT to serve probes and metrics on
    sessions: str = "127.0.0.1:0"  # HOST:PORT where agents call the model
    peers: str | None = None  # HOST:PORT where workers on other hosts fetch weights
    gpu_memory: float | None = None  # fraction of its GPUs' memory for its engine
    import_vllm: bool = False  # while waiting for the run


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--redis",
    "redis_url",
    required=True,
    envvar=URL_VARIABLE,
    help=f"Server of the run: redis://, rediss:// or unix://; default: {URL_VARIABLE}.",
)
@click.option("--run", required=True, help="The run's name.")
@click.option("--worker-id", help="A unique name for this worker; a restarted one may use its old name.")
@click.option(
    "--join",
    metavar="HOST:PORT",
    help="Join the engine of another host's worker (worker.hosts), at that host and the port it listens on.",
)
@click.option(
    "--hosts",
    default="0.0.0.0:9600",
    show_default=True,
    metavar="HOST:PORT",
    help="Address where other hosts join this worker's engine, if worker.hosts is above 1.",
)
@click.option("--model", help="Folder or hub name of the model, instead of the configuration's.")
@click.option(
    "--allow-model-root", multiple=True, help="The run may name any model under this folder or hub organisation."
)
@click.option(
    "--allow-reward-code",
    multiple=True,
    metavar="TARGET",
    help="The run may use this reward function; `sandbox`: run generated programs.",
)
@click.option(
    "--allow-reward-network", multiple=True, metavar="TARGET", help="This reward function may open connections."
)
@click.option(
    "--allow-reward-env", multiple=True, metavar="NAME", help="Reward functions may get this environment variable."
)
@click.option("--allow-host", multiple=True, metavar="HOST", help="The run may use reward servers on this host.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model's folder.")
@click.option("--local-reward-url", help="The reward server that the run's configuration calls `local`.")
@click.option(
    "--http", metavar="HOST:PORT", help="Serve /livez, /readyz and /metrics at this address; port 0: any free one."
)
@click.option(
    "--peers",
    metavar="HOST:PORT",
    help="Exchange weights with other hosts' workers: a numeric address that they can reach.",
)
@click.option(
    "--sessions",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address where agents query the model, if the run has agents; port 0: any free one.",
)
@click.option(
    "--gpu-memory",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the GPUs' memory for vLLM, if others use them too; worker.engine_args wins.",
)
@click.option("--import-vllm", is_flag=True, help="Import vLLM while waiting for the run, if its engine is vLLM.")
@click.option(
    "--log-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the log as JSON Lines to this file."
)
def main(
    worker_id: str | None,
    allow_model_root: tuple[str, ...],
    allow_reward_code: tuple[str, ...],
    allow_reward_network: tuple[str, ...],
    allow_reward_env: tuple[str, ...],
    allow_host: tuple[str, ...],
    trust_remote_code: bool,
    log_file: Path | None,
    **other_options: Any,
) -> None:
    """Generate rollouts for a run: tickets from Redis, samples from the engine, rewards, groups back to Redis.

    What the run's configuration asks for is used only where these options allow it. SIGTERM hands tickets back and
    ends the worker within `worker.grace_s`.
    """
    options = Options(
        worker=worker_id or f"{socket.gethostname()}-{os.getpid()}",
        permissions=Permissions(
            reward_code=allow_reward_code,
            reward_network=allow_reward_network,
            reward_environment=allow_reward_env,
            model_roots=allow_model_root,
            hosts=allow_host,
            trust_remote_code=trust_remote_code,
        ),
        **other_options,
    )
    with _engines_ahead(options):
        configure_logging(f"worker/{options.worker}", log_file)
        code = _run(options)
    _leave(code)


def _engines_ahead(options: Options) -> AbstractContextManager[None]:
    """Entered before anything else, as they may be forked: from one thread, without a log or a handler of signals."""
    if not options.import_vllm:
        return nullcontext()
    from streamrl.workers.engines.vllm.start import engines_ahead

    return engines_ahead()


def _run(options: Options) -> int:
    try:
        asyncio.run(_serve(options))
    except StreamrlError as error:
        log.error("worker_ended", error=str(error), kind=type(error).__name__)
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except Exception:
        log.exception("worker_failed")
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads, as sys.exit would: one may still be starting an engine or waiting for a dead
    server, and take long to notice that it is no longer needed."""
    for child in multiprocessing.active_children():  # of an engine that failed too early in its start to be stopped
        child.kill()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


class _Threads(ThreadPoolExecutor):
    """The event loop's executor, which also resolves host names. asyncio's default has only a few more threads than
    there are cores, so one slow DNS lookup could hold up weights and Redis; and asyncio waits for its threads at exit,
    however long they take."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def _serve(options: Options) -> None:
    from streamrl.workers.service import serve

    asyncio.get_running_loop().set_default_executor(_Threads(_THREADS, thread_name_prefix="worker"))
    stop = asyncio.Event()
    for number in signals_to_end():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(options, stop, leave=_leave)


if __name__ == "__main__":
    main()
