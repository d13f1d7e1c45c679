"""Which of vLLM's errors is taken for the reason why it did not start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.workers.engines.vllm.failure import record_failure, take_failure

_LEARNED = RuntimeError("Engine core initialization failed. See root cause above.")


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[logging.Logger]:
    own = logging.getLogger("vllm")
    before = list(own.handlers)
    record_failure(tmp_path)
    record_failure(tmp_path)  # a plugin may be loaded twice
    assert len(own.handlers) == len(before) + 1
    yield logging.getLogger("vllm.v1.engine.core")
    own.handlers[:] = before


def log(logger: logging.Logger, message: str, error: Exception) -> None:
    try:
        raise error
    except Exception:
        logger.exception(message)


def test_the_first_process_that_fails_to_start_is_the_reason(logger: logging.Logger, tmp_path: Path) -> None:
    assert take_failure(tmp_path, _LEARNED) == str(_LEARNED)
    log(logger, "Something else failed, and was gone without.", OSError("no matter"))
    assert take_failure(tmp_path, _LEARNED) == str(_LEARNED)
    log(logger, "WorkerProc failed to start.", ValueError("Free memory on device\n(1.0 GiB) is less than desired"))
    log(logger, "EngineCore failed to start.", Exception("WorkerProc initialization failed"))
    assert take_failure(tmp_path, _LEARNED) == "ValueError: Free memory on device (1.0 GiB) is less than desired"
    log(logger, "WorkerProc failed to start.", OSError("at the next start"))
    assert take_failure(tmp_path, _LEARNED) == "OSError: at the next start"


def test_a_message_of_pages_is_cut(logger: logging.Logger, tmp_path: Path) -> None:
    log(logger, "EngineCore failed to start.", ValueError("word " * 10_000))
    assert len(take_failure(tmp_path, _LEARNED)) == 600
