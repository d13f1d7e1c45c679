"""Our weight-transfer engine, which loads versions into vLLM's model; runs in each of vLLM's worker processes.

    full     the worker's mirror, a safetensors file in shared memory ─► vLLM's layerwise reload
    patch    the changes in it ─► single elements of live parameters and packed copies (`places`)

A full load passes tensors to vLLM under their checkpoint-file names (`hub_names`), and handles three facts about vLLM
0.32 on CPUs:

- Linear weights are repacked and freed after loading, so `load_weights` alone fails. vLLM's layerwise reload restores
  each layer, loads it, repacks it and copies the result over the old one.
- With tied embeddings the reload takes the head for a layer without weights and keeps its packed copy of the *old*
  embedding: the model returns old logits and raises nothing. So the head is packed again.
- Experts are packed only at the first load, so reloads must find them without a kernel (`experts`).

CUDA graphs stay as captured: the layerwise reload loads a layer into new memory and copies the result into the tensors
that graphs and compiled code point to. Nothing is captured or compiled again, and peak GPU memory grows by one layer.
Compiled code reads weights as inputs, not as constants: read in vLLM's code, and seen with the canary on an H200.

A failed load leaves the model unusable; the error reaches the worker, which ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl.workers.engines.mapped_file import decoys, mapped_for
from streamrl.workers.engines.vllm.loading.experts import keeping_kernels, packed_once
from streamrl.workers.engines.vllm.loading.host_mirror import mirror_here
from streamrl.workers.engines.vllm.loading.hub_names import HubNames, Named
from streamrl.workers.engines.vllm.loading.linears import make_writable
from streamrl.workers.engines.vllm.loading.loaders import written_past_loaders
from streamrl.workers.engines.vllm.loading.places import LivePlaces, places_in

_TRANSFORMERS = "vllm.model_executor.models.transformers"


@dataclass
class MirrorInit(WeightTransferInitInfo):
    """Empty: each update names its file."""


@dataclass
class MirrorUpdate(WeightTransferUpdateInfo):
    path: str  # the mirror's safetensors file; it does not change while the update runs
    decoy: bool = False  # load weights that differ from the file in every element
    version: int = 0
    patch: str | None = None  # patch file; None: load all weights


class MirrorWeightTransfer(WeightTransferEngine[MirrorInit, MirrorUpdate]):
    init_info_cls = MirrorInit
    update_info_cls = MirrorUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mirror = mapped_for(self.device)
        self._names: HubNames | None = None
        self._version = 0  # version served in full; 0: none, or unknown
        self._places: LivePlaces | None = None
        if self.device.type == "cpu" and self.model_config.enforce_eager and self.vllm_config.lora_config is None:
            make_writable(self.model)
        # vLLM warns of every layer without weights, including rotary embeddings and tied heads. `_load` checks itself.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: MirrorInit) -> None:
        del init_info

    def start_weight_update(self) -> None:
        """Nothing to do before the update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class calls `torch.accelerator.synchronize()`, which raises on machines without an accelerator.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MirrorUpdate) -> None:
        version, self._version = self._version, 0
        update_info.path = mirror_here(update_info.path, version=update_info.version)
        if update_info.patch is None:
            for method in packed_once(self.model):
                method.moe_kernel = None
            with keeping_kernels(self.model, self.device):
                initialize_layerwise_reload(self.model)
                self._load(update_info)
                self._finish_load()
            if self._places is not None and not self._places.are_of(self._mirror.tensors(update_info.path)):
                self._places = None
        else:
            assert self._places is not None, "a patch is written only for known places"
            self._places.write(Path(update_info.patch), since=version)
        self._version = 0 if update_info.decoy else update_info.version

    def places(self, path: str) -> dict[str, Any]:
        """Return the places of this file's tensors in the model, for writing patches; or why there are none."""
        if self._places is None:
            num_shards = self.parallel_config.world_size
            tensors = self._mirror.tensors(self.path_here(path))
            found = places_in(self.model, tensors, in_files=self.in_files, num_shards=num_shards)
            if isinstance(found, str):
                return {"reason": found, "places": []}
            self._places = found
        return {"reason": "", "places": [asdict(place) for place in self._places.places]}

    def path_here(self, path: str) -> str:
        """Return the path on this host, whose mirror must still hold the served version."""
        return mirror_here(path, version=self._version)

    def _load(self, update_info: MirrorUpdate) -> None:
        model: Any = self.model  # every vLLM model has `load_weights`
        wanted = {name for name, _ in model.named_parameters()}
        if self._tied:
            wanted -= {f"{name}.weight" for name, _ in self._heads()}
        tensors = self._mirror.tensors(update_info.path)
        given = self.in_files(decoys(tensors) if update_info.decoy else tensors)
        loaded = set(model.load_weights(given))
        if missing := wanted - loaded:
            raise ValueError(f"{update_info.path} lacks {len(missing)} parameters, {min(missing)} for one")
        if lost := written_past_loaders(model, loaded):
            raise ValueError(
                f"vLLM cannot reload the weights of a running {type(model).__name__}: it writes {len(lost)} of its "
                f"parameters past its loaders, {lost[0]} for one, and a reload loses these; set "
                "worker.engine=transformers"
            )

    def in_files(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Rename the mirror's tensors as in the model's files. vLLM's transformers backend takes them unchanged: it
        knows transformers' names, and it patches transformers so that HubNames cannot build a model here."""
        if type(self.model).__module__.startswith(_TRANSFORMERS):
            return iter(tensors)
        if self._names is None:
            config = self.model_config
            self._names = HubNames(config.model, trust_remote_code=config.trust_remote_code)
        return self._names.of(tensors)

    def finish_weight_update(self) -> None:
        """Nothing to do after the update."""

    def _finish_load(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._tied:
            for _, head in self._heads():
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self._places = None
        self._mirror.close()

    @property
    def _tied(self) -> bool:
        return bool(self.model_config.hf_text_config.tie_word_embeddings)

    def _heads(self) -> list[tuple[str, ParallelLMHead]]:
        return [(name, module) for name, module in self.model.named_modules() if isinstance(module, ParallelLMHead)]
