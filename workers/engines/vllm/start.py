"""Starts a vLLM engine, and ends it: checks the installation, imports vLLM, builds its configuration, starts the
processes. EngineCore is killed if it starts too slowly or a host is lost; else vLLM shuts down unread.

Blocks on vLLM's start, in the thread that calls `build_llm`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from streamrl.config.routers import refuse_large, wants_routes
from streamrl.errors import ConfigError, EngineError, ResourceError
from streamrl.extras import install
from streamrl.held_folders import scratch_folder
from streamrl.misfits import misfits
from streamrl.tasks import cancel_all
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.routes import shape_of_vllm
from streamrl.workers.engines.vllm.arguments import engine_args, refuse_unknown, several_hosts
from streamrl.workers.engines.vllm.failure import cache_remedy, take_failure
from streamrl.workers.engines.vllm.forked import forking_engines, import_ahead
from streamrl.workers.engines.vllm.steps import StepWatch, watch_steps
from streamrl.workers.engines.vllm.variables import (
    network_variables,
    platform_variables,
    process_variables,
    quiet,
    set_variables,
    take_back_variables,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

FRONT_END = "vllm.v1.engine.async_llm"
_MODELS = "vllm.model_executor.models.registry"
# vLLM inspects a model's class in a subprocess. Started by this command, it too skips the incompatible packages.
LOOK_AT_MODEL = [sys.executable, "-c", f"import runpy, streamrl; runpy.run_module('{_MODELS}', run_name='__main__')"]


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
    if not any(plugin.value.startswith("streamrl.workers.engines.vllm.plugin:") for plugin in plugins):
        raise ResourceError(
            "vLLM does not find streamrl's weight transfer, which is an entry point of the installed "
            "package: run from an installation (pip install -e .), not from a bare checkout, and install again after "
            "an update of the checkout"
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


def kill_engine_core() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()


async def stop_reading(llm: AsyncLLM) -> None:
    """Stop reading outputs before shutdown; else vLLM may report it as an engine death, with a traceback."""
    if llm.output_handler is not None:
        await cancel_all([llm.output_handler])
        llm.output_processor.propagate_error(EngineError("the engine was stopped"))


def vllm_config(settings: EngineSettings, scratch: Path, meeting: Meeting | None) -> VllmConfig:
    """Import vLLM and build its configuration; also sets the environment that its processes inherit."""
    take_back_variables()
    set_variables(process_variables(settings.config.worker, scratch))
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
    set_variables(platform_variables(arguments, settings.config.worker, on_cpu=current_platform.is_cpu()))
    if meeting is not None:
        set_variables(network_variables(meeting))
        arguments |= several_hosts(settings.config.worker, meeting)
    config = engine_config(AsyncEngineArgs, arguments)
    if wants_routes(settings.config):
        refuse_large(settings.config, shape_of_vllm(config.model_config))
    return config


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
