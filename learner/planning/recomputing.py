"""Whether layers keep only their input for the backward pass, which computes the rest again.

It costs a third more computation, so it is done only where memory is short: on GPUs whose calculated peak, with
headroom, would leave less than a tenth of the GPU if everything were kept, or is not known.
"""

from __future__ import annotations

import structlog
import torch

from streamrl.config import schema
from streamrl.learner.packing.attention import VARLEN
from streamrl.learner.planning.memory import MemoryEstimate, plan
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.process.ranks import World
from streamrl.terminal import size

_MOST = 0.9  # of the room. An H100 that the calculation would have filled to 0.98 was out of memory, by fragments

log = structlog.get_logger(__name__)


def recomputes(config: schema.Config, sizes: Sizes, world: World, *, teacher: Sizes | None = None) -> bool:
    """Whether this rank's layers do, as all others'. A collective, if the configuration leaves it open on a GPU."""
    wished = config.model.gradient_checkpointing
    if wished != "auto":
        return wished
    if world.device.type != "cuda":
        return False
    room = room_on(world.device)
    keeping = _to_keep_all(sizes, config, ranks=world.size, teacher=teacher)
    keeps_all = world.all_agree(keeping is not None and keeping.needed <= _MOST * room)
    told = "all activations are kept" if keeps_all else "layers are computed again in the backward pass"
    if keeping is None:
        about = {"reason": _uncounted(sizes, config)}
    else:
        about = {"to_keep_all": size(keeping.needed), "room": size(room)}
    if world.is_main:
        log.info(told, setting="model.gradient_checkpointing: auto", **about)
    return not keeps_all


def _uncounted(sizes: Sizes, config: schema.Config) -> str | None:
    """What of a layer's activations the calculation does not know. Counted, dropout of a 7B model's adapters took 45 %
    more, a mask up to 35."""
    if config.model.dtype != "bfloat16":
        return "memory is only calculated for bfloat16"
    if config.model.activations == "cpu":
        return "only inputs of layers wait on the host"
    if sizes.attends(config.model) != VARLEN:
        return "what attention with a mask keeps is not calculated"
    if config.model.lora is not None and config.model.lora.dropout:
        return "what dropout of adapters keeps is not calculated"
    return None


def room_on(device: torch.device) -> int:
    """Bytes of a GPU that this process may use."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def expected(sizes: Sizes, config: schema.Config, *, ranks: int, room: int, teacher: Sizes | None) -> MemoryEstimate:
    """The plan by which so many ranks, with this room on each GPU, will decide."""
    if config.model.gradient_checkpointing == "auto":
        keeping = _to_keep_all(sizes, config, ranks=ranks, teacher=teacher)
        if keeping is not None and keeping.needed <= _MOST * room:
            return keeping
    return plan(sizes, config, ranks=ranks, teacher=teacher)


def _to_keep_all(sizes: Sizes, config: schema.Config, *, ranks: int, teacher: Sizes | None) -> MemoryEstimate | None:
    """The plan in which no layer is computed again; None if it cannot be told."""
    if _uncounted(sizes, config) is not None:
        return None
    kept = config.model_copy(update={"model": config.model.model_copy(update={"gradient_checkpointing": False})})
    return plan(sizes, kept, ranks=ranks, teacher=teacher)
