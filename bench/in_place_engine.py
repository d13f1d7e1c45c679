"""vLLM in this very process, whose loads are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench.measure import seconds
from bench.proofs_engine import EngineHere
from streamrl.workers.engines import vllm_linears
from streamrl.workers.engines.vllm_linears import as_vllm_packs


class TimedEngine(EngineHere):
    took_s = 0.0  # the last load, once the patch was there

    def own_reload(self, path: Path) -> float:
        """vLLM's own, of tensors in its memory that are served already."""
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        with as_vllm_packs(self.model):
            took_s = seconds(lambda: self._worker.reload_weights(weights_iterator=iter(held.items())))
        self._worker.reload_weights(weights_iterator=iter(held.items()))  # as ours are packed
        return took_s

    def _update(self, info: dict[str, Any]) -> None:
        self.took_s = seconds(lambda: EngineHere._update(self, info))


def leave_packing_to_vllm() -> None:
    """As on processors where no kernel's packed weights can be written to. For engines to come."""
    vllm_linears.is_as_fast = lambda: False
