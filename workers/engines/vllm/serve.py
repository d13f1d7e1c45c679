"""Runs vLLM's OpenAI-compatible server, for `streamrl serve`. As with a worker's engine, its processes are spawned, end
with their parent, leave no temporary files, and do not import packages that are incompatible with this torch."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from streamrl.errors import DataError, ResourceError, UserError
from streamrl.held_folders import scratch_folder
from streamrl.misfits import misfits
from streamrl.workers.engines.vllm.arguments import CPU_KV_CACHE_BYTES
from streamrl.workers.engines.vllm.plugin import OWNER_VARIABLE, SOCKETS_VARIABLE, keep_temporary_files_in
from streamrl.workers.engines.vllm.start import LOOK_AT_MODEL

_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def serve(model: str, *, name: str, host: str, port: int, further: Sequence[str]) -> None:
    """Serve until stopped. No GPU has run this."""
    with scratch_folder() as scratch:
        os.environ.update(_ENVIRONMENT | {OWNER_VARIABLE: str(os.getpid()), SOCKETS_VARIABLE: str(scratch)})
        keep_temporary_files_in(str(scratch))
        _serve(model, name=name, host=host, port=port, further=further)


def _serve(model: str, *, name: str, host: str, port: int, further: Sequence[str]) -> None:
    try:
        from vllm.entrypoints.launchers.api_server.entry import main
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ResourceError(f"vLLM cannot be imported: {error}") from error
    if misfits():
        registry._SUBPROCESS_COMMAND = LOOK_AT_MODEL
    options = options_of(model, name=name, host=host, port=port, on_cpu=current_platform.is_cpu())
    sys.argv = ["streamrl serve", *options, *further]  # the last occurrence of an option wins
    try:
        main()
    except OSError as error:
        if (mistake := mistake_of(error, model=model, port=port)) is None:
            raise
        raise mistake from error


def mistake_of(error: OSError, *, model: str, port: int) -> UserError | None:
    """Return the user error behind `error`, or None for a defect. Errors of a hub or its cache have no errno."""
    if error.errno == errno.EADDRINUSE:
        return ResourceError(f"port {port} is taken; choose another with --port")
    if error.errno is None:
        return DataError(f"model {model!r} cannot be served: {str(error).splitlines()[0]}")
    return None


def options_of(model: str, *, name: str, host: str, port: int, on_cpu: bool) -> list[str]:
    """Return vLLM's options. Like training, serving ignores sampling defaults in `generation_config.json`."""
    options = ["--model", model, "--served-model-name", name, "--generation-config", "vllm"]
    options += ["--config-format", "hf", "--tokenizer-mode", "hf"]  # as a worker's engine does by default
    options += ["--host", host, "--port", str(port)]
    if on_cpu:  # vLLM's own default is nearly all memory
        options += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return options
