"""vLLM in this process, with timed loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench.measure import seconds
from bench.proofs_engine import EngineHere
from streamrl.workers.engines.vllm.loading import linears
from streamrl.workers.engines.vllm.loading.linears import as_vllm_packs


class TimedEngine(EngineHere):
    took_s = 0.0  # seconds of the last load, without writing the patch

    def own_reload(self, path: Path) -> float:
        """Time vLLM's own reload of tensors from memory; they are already being served."""
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        with as_vllm_packs(self.model):
            took_s = seconds(lambda: self._worker.reload_weights(weights_iterator=iter(held.items())))
        self._worker.reload_weights(weights_iterator=iter(held.items()))  # restore our packed layout
        return took_s

    def _update(self, info: dict[str, Any]) -> None:
        self.took_s = seconds(lambda: EngineHere._update(self, info))


def leave_packing_to_vllm() -> None:
    """Make later engines behave as on processors where no kernel has writable packed weights."""
    linears.has_fast_packed_kernel = lambda: False
