"""vLLM in this process behind the worker's engine interface: an engine within seconds, one per process.

It runs the same proofs as a worker: loads, read-back and canary logprobs are those of `vllm.loading.transfer` and
`read_back` on vLLM's own model; vLLM's front end and processes are left out.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config.engine_args import Form
from streamrl.protocol.weights.changes import Changed
from streamrl.workers.engines.base import EngineStats, Generated, Load, ReadBack, SampleRequest
from streamrl.workers.engines.vllm.loading.patches import Place, write_patch
from streamrl.workers.engines.vllm.plugin import WEIGHT_TRANSFER_BACKEND, WORKER_EXTENSION

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def import_vllm() -> None:
    """Import vLLM before forking processes that each have an engine."""
    os.environ.update(_ENVIRONMENT)
    importlib.import_module("vllm").LLM  # noqa: B018 - accessing the attribute imports it


class EngineHere:
    """An engine that cannot generate."""

    reason = ""  # why the last version was loaded in full

    def __init__(self, model: Path, dtype: str, form: Form | None = None) -> None:
        from vllm import LLM

        self.patch = model / "patch"
        self.llm = LLM(
            str(model),
            dtype=dtype,
            quantization=form,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=96,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config={"backend": WEIGHT_TRANSFER_BACKEND},
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
        )
        core: Any = self.llm.llm_engine.engine_core
        self._worker = core.engine_core.model_executor.driver_worker.worker

    @property
    def model(self) -> Any:
        return self._worker.get_model()

    async def start(self) -> None:
        """Do nothing: it is ready."""

    async def load(self, load: Load) -> None:
        changed = load.changed
        self.reason = "a full load is requested" if changed is None else self._write_patch(changed, load.weights)
        patch = None if self.reason else str(self.patch)
        self._update({"path": str(load.weights), "version": load.version, "patch": patch})

    def _write_patch(self, changed: Changed, weights: Path) -> str:
        found = self._worker.streamrl_places(str(weights))
        places = [Place(**place) for place in found["places"]]
        return found["reason"] or write_patch(changed, places, self.patch) or ""

    async def load_decoy(self, weights: Path) -> None:
        self._update({"path": str(weights), "decoy": True})

    def _update(self, info: dict[str, Any]) -> None:
        engine = self._worker.weight_transfer_engine
        engine.start_weight_update()
        engine.update_weights(info)
        engine.finish_weight_update()

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        found = self._worker.streamrl_read_back(str(weights), number, num_parts)
        return ReadBack(num_read=found["num_read"], wrong=tuple(found["wrong"]), unreadable=tuple(found["unreadable"]))

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        ids = token_ids.tolist()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        [output] = self.llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
        positions = output.prompt_logprobs
        assert positions is not None, "prompt_logprobs were requested"
        values = [at[token].logprob for at, token in zip(positions[1:], ids[1:], strict=True) if at is not None]
        return np.minimum(np.asarray(values, dtype=np.float32), 0.0)

    async def generate(self, request: SampleRequest) -> Generated:
        raise NotImplementedError("this engine is for proofs")

    async def check_alive(self) -> None:
        """Do nothing: it shares this process."""

    async def stop(self) -> None:
        """Do nothing: it ends with the process."""

    def stats(self) -> EngineStats:
        return EngineStats(in_flight=0, num_made=0, num_waiting=0, kv_used=0.0)
