"""Why vLLM's processes did not start: only they know, and the process that waits for them learns that they failed.

EngineCore, rank ──its exception, as vLLM logs it──► a file in the engine's scratch folder
worker ──reads the file──► "vLLM did not start: ValueError: ..."
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

_FILE = "failed-to-start"
_LOGGED = "failed to start"  # by vLLM, with the exception: "EngineCore failed to start.", "WorkerProc failed to start."
_MOST_CHARACTERS = 600
_SMALL_CACHE = ("No available memory for the cache blocks", "larger than the available KV cache memory")  # vLLM's words


def record_failure(folder: Path) -> None:
    """Record this process's failure to start, if it comes to that. The first of an engine's processes is recorded: the
    others fail because of it."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(folder))


def take_failure(folder: Path, error: Exception) -> str:
    """Return the recorded failure, in one line, and forget it: the next start may fail for another reason. Without one,
    return that of `error`."""
    path = folder / _FILE
    with suppress(OSError):
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return text
    return str(error)


def cache_remedy(reason: str, num_bytes: int | None) -> str:
    """Return what to add to a reason that is a KV cache without room for one sequence, if its size is set in bytes, as
    on CPUs: vLLM names a share of the memory, which it then ignores, and `max_model_len`, which samples need."""
    if num_bytes is None or not any(words in reason for words in _SMALL_CACHE):
        return ""
    setting = f"worker.engine_args.kv_cache_memory_bytes, which is {num_bytes}"
    return f"; what counts here is {setting}: raise it, or make the run's sequences shorter"


class _Recorder(logging.Handler):
    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = folder / _FILE

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or _LOGGED not in record.getMessage():
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with suppress(OSError), self._path.open("x", encoding="utf-8") as file:
            file.write(text[:_MOST_CHARACTERS])
