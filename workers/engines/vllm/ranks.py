"""Fixes for vLLM's multi-rank engines: run once when all ranks are up, and again when the engine ends.

- On CPUs, ranks share memory under /dev/shm, and only an orderly exit unlinks its names. So each rank unlinks its own
  name once the others have attached: the memory is freed with the last rank, however they end.
- Ranks and EngineCore also exchange messages through shared memory, on GPUs too. All are killed when the engine ends,
  so the worker unlinks these names; if the worker is killed, Python's resource tracker does.
- vLLM 0.32 allocates a later pipeline stage's input buffer during warm-up, which it skips on CPUs when nothing is
  compiled: the first sample would crash such an engine. So it is allocated here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")
_SEGMENT_NAME = re.compile(rf"{_SHARED_MEMORY}/(psm_\w+)$", re.MULTILINE)  # Python's naming


def prepare_rank(runner: Any) -> list[str]:
    """Prepare this rank; return the names of its message segments. `runner`: vLLM's model runner."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        shared = getattr(group.device_communicator, "dist_module", None)
        if (name := getattr(shared, "group_name", None)) is not None:
            (_SHARED_MEMORY / f"{name}_{group.rank_in_group}").unlink(missing_ok=True)
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return sorted(message_segments(os.getpid()))


def message_segments(pid: int) -> set[str]:
    """Return the names of the message segments this process has mapped."""
    return set(_SEGMENT_NAME.findall(Path(f"/proc/{pid}/maps").read_text()))


def remove_shared(names: Iterable[str]) -> None:
    """Unlink the segments that still exist."""
    for name in names:
        try:
            segment = SharedMemory(name)
        except FileNotFoundError:
            continue
        segment.close()
        segment.unlink()
