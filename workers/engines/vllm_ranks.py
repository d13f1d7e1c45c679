"""What the ranks of one engine need beside what vLLM does: once, when all of them stand, and when the engine ends.

- On CPUs they share memory under /dev/shm, by names that only an orderly end takes away. So each takes its own names
  away as soon as the others have met: the memory goes with the last rank, however they end.
- They talk to each other and to EngineCore through memory of the same kind, on GPUs too. All are killed when the engine
  ends, so its worker takes these names away; of a worker that is killed, Python's resource tracker does.
- vLLM 0.32 makes a later stage's place for what comes from the stage before it while it warms up, and on CPUs leaves
  that out where nothing is compiled: the first sample would end such an engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

_SHARED = Path("/dev/shm")
_TALKED_THROUGH = re.compile(rf"{_SHARED}/(psm_\w+)$", re.MULTILINE)  # as Python names them


def prepare_rank(runner: Any) -> list[str]:
    """`runner`: vLLM's, of this rank's model. Through what it talks to the others."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        shared = getattr(group.device_communicator, "dist_module", None)
        if (name := getattr(shared, "group_name", None)) is not None:
            (_SHARED / f"{name}_{group.rank_in_group}").unlink(missing_ok=True)
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return sorted(talked_through(os.getpid()))


def talked_through(pid: int) -> set[str]:
    """The names of what this process shares with others."""
    return set(_TALKED_THROUGH.findall(Path(f"/proc/{pid}/maps").read_text()))


def remove_shared(names: Iterable[str]) -> None:
    """Those that are still there."""
    for name in names:
        try:
            segment = SharedMemory(name)
        except FileNotFoundError:
            continue
        segment.close()
        segment.unlink()
