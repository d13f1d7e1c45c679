"""Starts a vLLM engine: checks the installation, builds arguments and environment, starts the processes.

Blocks on vLLM's start, in the thread that calls `build_llm`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from streamrl.config import schema
from streamrl.config.engine_args import PROOF_LENGTH, check_engine_args, quantized_as, ranks_in
from streamrl.config.placement import parallel_in
from streamrl.config.routers import refuse_large, wants_routes
from streamrl.errors import ConfigError, EngineError, ResourceError
from streamrl.extras import install
from streamrl.held_folders import scratch_folder
from streamrl.interface import gloo_from
from streamrl.misfits import misfits
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.routes import shape_of_vllm, vllm_args
from streamrl.workers.engines.vllm_failure import cache_remedy, take_failure
from streamrl.workers.engines.vllm_forked import forking_engines, import_ahead
from streamrl.workers.engines.vllm_plugin import (
    OWNER_VARIABLE,
    SOCKETS_VARIABLE,
    WEIGHT_TRANSFER_BACKEND,
    WORKER_EXTENSION,
)
from streamrl.workers.engines.vllm_steps import StepWatch, watch_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default on a CPU is nearly all memory
_MAX_SEQUENCES = 1024
FRONT_END = "vllm.v1.engine.async_llm"
_MODELS = "vllm.model_executor.models.registry"
# vLLM inspects a model's class in a subprocess. Started by this command, it too skips the incompatible packages.
LOOK_AT_MODEL = [sys.executable, "-c", f"import runpy, streamrl; runpy.run_module('{_MODELS}', run_name='__main__')"]
# This process's variables before an engine set them; None: not set. A global, since the environment is one as well.
_BEFORE: dict[str, str | None] = {}


def check_installed(
    *, find: Callable[[str], object | None] = find_spec, plugins: Iterable[EntryPoint] | None = None
) -> None:
    """Raise ResourceError if vLLM is missing, or if it would not find our plugin."""
    if find("vllm") is None:
        raise ResourceError(
            f"worker.engine=vllm but vLLM is not installed: `{install('worker-cpu')}` (or worker-gpu), "
            "or set worker.engine=transformers"
        )
    if plugins is None:
        plugins = entry_points(group="vllm.general_plugins")
    if not any(plugin.value.startswith("streamrl.workers.engines.vllm_plugin:") for plugin in plugins):
        raise ResourceError(
            "vLLM does not find streamrl's weight transfer, which is an entry point of the installed "
            "package: run from an installation (pip install -e .), not from a bare checkout"
        )


@contextmanager
def engines_ahead() -> Iterator[None]:
    """Import vLLM ahead, in a process that later engines are forked from. Enter from the main thread, before any other
    thread starts."""
    if find_spec("vllm") is None:
        yield  # reported once the run is known and needs it
        return
    os.environ.update(quiet())
    with scratch_folder() as scratch:
        import_ahead(scratch)
        yield


async def import_front_end() -> None:
    """Import vLLM's front end in a thread, while the worker waits for the run."""
    beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="imports vllm")  # asyncio joins its own executor
    with suppress(ImportError):  # reported when an engine is built
        await asyncio.get_running_loop().run_in_executor(beside, import_module, FRONT_END)


def build_llm(settings: EngineSettings, scratch: Path, meeting: Meeting | None = None) -> tuple[AsyncLLM, StepWatch]:
    """Import vLLM, start its processes, and return when the model is ready. `scratch`: for sockets and temporary files,
    some of which vLLM leaves behind. `meeting`: for an engine over several hosts."""
    config = vllm_config(settings, scratch, meeting)
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    try:
        with forking_engines() if config.model_config.enforce_eager else nullcontext():
            llm = AsyncLLM(config, Executor.get_class(config), log_stats=True, log_requests=False)
    except Exception as error:  # vLLM's own errors have no common base
        reason = take_failure(scratch, error)
        remedy = cache_remedy(reason, config.cache_config.kv_cache_memory_bytes)
        raise EngineError(f"vLLM did not start: {reason}{remedy}") from error
    return llm, watch_steps(llm)


def vllm_config(settings: EngineSettings, scratch: Path, meeting: Meeting | None) -> VllmConfig:
    """Import vLLM and build its configuration; also sets the environment that its processes inherit."""
    _take_back_environment()
    _set_environment(_environment(settings.config.worker, scratch))
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ResourceError(f"worker.engine=vllm, but vLLM cannot be imported: {error}") from error

    if misfits():
        registry._SUBPROCESS_COMMAND = LOOK_AT_MODEL
    arguments = engine_args(settings, on_cpu=current_platform.is_cpu())
    refuse_unknown(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    _set_environment(_platform_environment(arguments, settings.config.worker, on_cpu=current_platform.is_cpu()))
    if meeting is not None:
        _set_environment(_network_environment(meeting))
        arguments |= _several_hosts(settings.config.worker, meeting)
    config = engine_config(AsyncEngineArgs, arguments)
    if wants_routes(settings.config):
        refuse_large(settings.config, shape_of_vllm(config.model_config))
    return config


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in wanted:
        _BEFORE.setdefault(name, os.environ.get(name))
    os.environ.update(wanted)


def _take_back_environment() -> None:
    """Restore the variables that an earlier engine of this process set: it may have had other settings, and what it set
    would count as the user's."""
    for name, value in _BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _BEFORE.clear()


def _several_hosts(worker: schema.Worker, meeting: Meeting) -> dict[str, Any]:
    return {
        "nnodes": worker.hosts,
        "node_rank": meeting.node,
        "master_addr": meeting.address,
        "master_port": meeting.port,
        "distributed_executor_backend": "mp",
    }


def _network_environment(meeting: Meeting) -> dict[str, str]:
    """Return the address and interface by which other hosts reach our ranks; an operator's own settings win."""
    return {"VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", meeting.own), **gloo_from(meeting.own)}


def engine_config(make: Callable[..., AsyncEngineArgs], arguments: Mapping[str, Any]) -> VllmConfig:
    """Build the configuration with the defaults of vLLM's own server. The defaults without a usage context prefill
    2,048 tokens at a time on any GPU; the server's prefill 8,192 on an H100."""
    from vllm.usage.usage_lib import UsageContext

    try:
        return make(**arguments).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM refuses this model or worker.engine_args: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """Reduce pydantic errors to key, value and message."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False)
        return "; ".join(
            f"{'.'.join(map(str, detail['loc']))} = {detail['input']!r:.60}: {detail['msg']}" for detail in found
        )
    return " ".join(str(error).split())


def refuse_unknown(arguments: Iterable[str], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"worker.engine_args.{name}: vLLM has no such argument{hint}")


def _environment(worker: schema.Worker, scratch: Path) -> dict[str, str]:
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


def _platform_environment(arguments: Mapping[str, Any], worker: schema.Worker, *, on_cpu: bool) -> dict[str, str]:
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


def engine_args(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Merge our defaults, the user's settings, and arguments that correctness depends on, which users cannot set."""
    config = settings.config
    # The last ticket may exceed the bound by all its samples but one; and a seat for a canary (`Seats`).
    seats = config.sampling.num_samples * (config.worker.max_groups_in_flight + 1)
    defaults: dict[str, Any] = {
        "max_model_len": max(settings.max_length, min(PROOF_LENGTH, settings.model.max_positions or PROOF_LENGTH)),
        "max_num_seqs": min(seats, _MAX_SEQUENCES),
        "enforce_eager": on_cpu,
        # The files that the learner reads, where a folder of Mistral's also has those of another form.
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "worker_extension_cls": WORKER_EXTENSION,  # a user's own class must derive from it, since proofs call it
    }
    route_args = vllm_args(config, on_cpu=on_cpu)
    if on_cpu:
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    else:
        defaults |= _gpu_args(settings)
    fixed: dict[str, Any] = {
        "model": settings.model.path,
        "trust_remote_code": settings.model.trust_remote_code,
        "dtype": config.weights.dtype,
        "seed": settings.seed,
        "load_format": "dummy",
        "generation_config": "vllm",  # not the model's own: sampling settings come from the run
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "scheduling_policy": "priority",
        **route_args,
    }
    for name in config.worker.engine_args:
        if name in fixed:
            raise ConfigError(f"worker.engine_args.{name}: streamrl sets this itself; remove it")
    for found in check_engine_args(config):  # again here: another process started the run
        raise ConfigError(f"{found.key} = {found.value}: {found.remedy}")
    if on_cpu:
        _refuse_on_cpu(config.worker)
    return {**defaults, **_with_canary(_with_draft_weights(config.worker.engine_args)), **fixed}


def _with_canary(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add a seat for a canary to the number of samples that the user set; each of its tokens has to fit a step."""
    seats = {name: arguments.get(name) for name in ("max_num_seqs", "max_num_active_seqs")}
    raised = {name: given + 1 for name, given in seats.items() if isinstance(given, int)}
    batched = arguments.get("max_num_batched_tokens")
    if isinstance(batched, int) and batched == arguments.get("max_num_seqs"):
        raised["max_num_batched_tokens"] = batched + 1
    return {**arguments, **raised}


def samples_at_once(config: VllmConfig) -> int:
    """Return how many samples vLLM can have if a seat is left for a canary."""
    scheduler = config.scheduler_config
    return (scheduler.max_num_active_seqs or scheduler.max_num_seqs) - 1


def _with_draft_weights(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Have vLLM load a draft model from its own folder. Else it gets the model's load format: random weights, whose
    drafts would never be accepted; the model's own come from the learner."""
    speculation = arguments.get("speculative_config")
    if not isinstance(speculation, Mapping):
        return dict(arguments)
    own = {"draft_load_config": {"load_format": "auto"}}
    return {**arguments, "speculative_config": {**own, **speculation}}


def _refuse_on_cpu(worker: schema.Worker) -> None:
    """ConfigError for arguments that vLLM's build for CPUs accepts, and cannot do."""
    if quantized_as(worker) not in (None, "fp8_per_channel"):
        raise ConfigError(
            f"worker.engine_args.quantization = {quantized_as(worker)}: vLLM's build for CPUs has no kernel for it; "
            "set fp8_per_channel, or remove it"
        )
    if worker.engine_args.get("enable_expert_parallel"):
        raise ConfigError(
            "worker.engine_args.enable_expert_parallel: vLLM's kernel for CPUs needs all experts of a layer, and dies "
            "with only some of them; remove it: with tensor_parallel_size alone each rank has a part of each expert"
        )
    if worker.engine_args.get("speculative_config"):
        raise ConfigError(
            "worker.engine_args.speculative_config: vLLM's build for CPUs draws wrong tokens when it speculates at a "
            "temperature above 0; remove it"
        )


def _gpu_args(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments that depend on the GPUs `streamrl up` gave this worker."""
    worker, found = settings.config.worker, {}
    if worker.gpus != "auto" and worker.gpus * worker.hosts > 1:
        found["tensor_parallel_size"] = worker.gpus * worker.hosts // parallel_in(worker)
    return found if settings.gpu_memory is None else {**found, "gpu_memory_utilization": settings.gpu_memory}
