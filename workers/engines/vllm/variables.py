"""The environment variables that vLLM and its processes need: a worker sets them before an engine starts, and takes
them back before the next one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.config import schema
from streamrl.config.engine_args import ranks_in
from streamrl.interface import gloo_from
from streamrl.workers.engines.base import Meeting
from streamrl.workers.engines.vllm.plugin import OWNER_VARIABLE, SOCKETS_VARIABLE

# This process's variables before an engine set them; None: not set. A global, since the environment is one as well.
_BEFORE: dict[str, str | None] = {}


def set_variables(wanted: Mapping[str, str]) -> None:
    for name in wanted:
        _BEFORE.setdefault(name, os.environ.get(name))
    os.environ.update(wanted)


def take_back_variables() -> None:
    """Restore the variables that an earlier engine of this process set: it may have had other settings, and what it set
    would count as the user's."""
    for name, value in _BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _BEFORE.clear()


def process_variables(worker: schema.Worker, scratch: Path) -> dict[str, str]:
    """Return variables to set before vLLM is imported; its processes inherit them."""
    wanted = {
        OWNER_VARIABLE: str(os.getpid()),
        SOCKETS_VARIABLE: str(scratch),
        # vLLM's default on GPUs is fork. A forked engine considers the plugin loaded, so it would miss its worker's
        # death and keep the GPU. It would also inherit the locks of this worker's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **quiet(),
    }
    if worker.threads:
        wanted["OMP_NUM_THREADS"] = str(worker.threads)
    return wanted


def quiet() -> dict[str, str]:
    """Return variables that vLLM reads at import."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }


def platform_variables(arguments: Mapping[str, Any], worker: schema.Worker, *, on_cpu: bool) -> dict[str, str]:
    wanted = {}
    if arguments["enforce_eager"]:
        # Even then vLLM compiles a sampler helper: a useless 10 s in the middle of the first batch.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    num_ranks = ranks_in(arguments) // worker.hosts  # on this host
    if on_cpu and ranks_in(arguments) == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # misleading name: the model runs in the EngineCore process
    elif on_cpu and (worker.threads or "OMP_NUM_THREADS" not in os.environ):
        cores = worker.threads or len(os.sched_getaffinity(0))
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // num_ranks))  # per rank
    if on_cpu and (worker.threads or ranks_in(arguments) > 1):
        # By default vLLM binds each rank to its own NUMA node, and fails with fewer nodes than ranks.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return wanted


def network_variables(meeting: Meeting) -> dict[str, str]:
    """Return the address and interface by which other hosts reach our ranks; an operator's own settings win."""
    return {"VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", meeting.own), **gloo_from(meeting.own)}
