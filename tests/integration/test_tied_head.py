"""A reload that does nothing, on real vLLM: the repair of the tied head is taken out, and reading back finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import streamrl
from streamrl.config import schema
from streamrl.errors import LoadRejected
from streamrl.protocol.weights.format import DType
from streamrl.protocol.weights.manifest import Manifest
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.base import EngineSettings, Load
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.proofs.proving import Prover
from tests.tiny_models import make_model
from tests.worker_world import worker_config

REPAIR = "head.quant_method.process_weights_after_loading(head)"

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def without_the_repair(folder: Path) -> Path:
    """Our code for vLLM's own processes, which import it anew; this process has the whole one already."""
    shutil.copytree(Path(streamrl.__file__).parent, folder / "streamrl")  # what links lead to is copied, too
    source = folder / "streamrl" / "workers" / "engines" / "vllm" / "loading" / "transfer.py"
    whole = source.read_text()
    assert whole.count(REPAIR) == 1
    source.write_text(whole.replace(REPAIR, "pass"))
    return folder


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("repaired", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_head_that_keeps_the_old_embedding_is_caught(
    tmp_path: Path, dtype: DType, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", tied=True, dtype=getattr(torch, dtype))
    mirror = folder / "model.safetensors"
    if not repaired:
        monkeypatch.syspath_prepend(without_the_repair(tmp_path / "code"))
    config = worker_config(threads=1, engine_args={"kv_cache_memory_bytes": 64 << 20}).model_copy(
        update={"weights": schema.Weights(dtype=dtype)}
    )
    facts = read_model(str(folder), trust_remote_code=False)
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    version = make_version(1, 0)
    manifest = Manifest(
        version=version, base=0, step=0, run_uid="run", tensors=(), shards=(), canary_ids=tuple(range(3, 40))
    )
    progress = Progress(part="worker/0", role="worker")
    prover = Prover(model=facts, dtype=dtype, progress=progress)
    try:
        await engine.start()
        await prover.rehearse(engine, mirror)
        await engine.load(Load(weights=mirror, version=version, step=0))
        if repaired:
            await prover.check(engine, mirror, manifest)
        else:
            with pytest.raises(LoadRejected, match=r"read back from the engine differ from those.*lm_head\.weight"):
                await prover.check(engine, mirror, manifest)
    finally:
        await engine.stop()
