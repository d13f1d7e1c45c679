"""vLLM's own way to take new weights, as a mix-in for its worker process (`worker_extension_cls`).

It is timed there, so that neither messages nor the step in progress count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from bench.measure import seconds
from streamrl.workers.engines.vllm.loading.linears import as_vllm_packs
from streamrl.workers.proofs.read_back import ReadBackExtension


class OwnReload(ReadBackExtension):
    """Each method is called in every worker process."""

    def hold_tensors(self, path: str) -> None:
        """Keep a copy of this file's tensors."""
        # vLLM's reload warns of tied heads as missing weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.inplace").setLevel(logging.ERROR)
        self._held = {name: tensor.clone() for name, tensor in load_file(path).items()}

    def reload_held(self) -> float:
        """Return the seconds of a reload from the tensors in memory."""
        return self._own_reload(self._held.items())

    def reload_file(self, path: str) -> float:
        return self._own_reload(safetensors_weights_iterator([path], use_tqdm_on_load=False))

    def restore_held(self) -> None:
        """Load the held tensors in our layout, which later deltas apply to."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(self._held.items()))

    def _own_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        worker: Any = self
        with as_vllm_packs(worker.get_model()):
            return seconds(lambda: worker.reload_weights(weights_iterator=iter(tensors)))
