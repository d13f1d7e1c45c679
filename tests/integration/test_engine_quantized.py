"""Engines that quantise what they load, on real vLLM: each version anew, proved to the bit, and within its own noise.

In FP8, by the kernels that vLLM has for any CPU. On GPUs it never ran, and experts in FP8 not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import safetensors.torch

from streamrl.errors import LoadRejected
from streamrl.protocol.weights.changes import Changed
from streamrl.versions import make_version
from streamrl.workers.engines.base import Load
from tests.integration.engine_world import Served, prompts, proving, started
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries; ours are watched by every other test
]

CASES = {
    "per channel": {"quantization": "fp8_per_channel"},
    "per channel, two ranks": {"quantization": "fp8_per_channel", "tensor_parallel_size": 2},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder, arguments = tmp_path_factory.mktemp("models"), {"kv_cache_memory_bytes": 64 << 20, **CASES[request.param]}
    made = [make_model(folder / str(n), architecture="llama", tied=False, kv_heads=2, seed=n) for n in range(3)]
    async with started(Served(made, engine="vllm", dtype="bfloat16", engine_args=arguments)) as serving:
        await serving.engine.load_decoy(serving.mirror(0))  # as a worker begins
        yield serving


async def test_each_load_is_quantised_anew_and_proved(served: Served) -> None:
    wrong = await served.engine.read_back(served.mirror(0), number=0, num_parts=1)
    assert len(wrong.wrong) == wrong.num_read
    for model in (0, 1, 2, 0):
        version = await served.load(model)
        found = await served.engine.read_back(served.mirror(model), number=1, num_parts=1)
        assert (found.num_read, found.wrong, found.unreadable) == (wrong.num_read, (), ())
        manifest, prover, progress = proving(served, version)
        await prover.check(served.engine, served.mirror(model), manifest)
        told = progress.report().detail
        assert told["rounding"] > 0.02  # of eight bits: sixteen are 0.01 off here
        with pytest.raises(LoadRejected, match="read back from the engine differ from those"):
            await prover.check(served.engine, served.mirror((model + 1) % 3), manifest)


async def test_a_load_comes_in_mid_sample(served: Served) -> None:
    first, asked = await served.load(0), prompts(4, seed=2)
    long = asyncio.gather(*(served.engine.generate(served.request(p, max_tokens=150, min_tokens=150)) for p in asked))
    await served.sample(prompts(1, seed=3), max_tokens=20, min_tokens=20)  # by then the others have come as far
    second = await served.load(1)
    for got in await long:
        assert [span.version for span in got.spans] == [first, second]


async def test_a_scale_that_is_not_of_its_weights_is_found(served: Served, tmp_path: Path) -> None:
    mirror, spoilt = served.mirror(1), tmp_path / "spoilt.safetensors"
    tensors = safetensors.torch.load_file(mirror)
    tensors["model.layers.1.mlp.up_proj.weight"][-1] *= 8  # the same bits in eight, and another scale
    safetensors.torch.save_file(tensors, spoilt)
    await served.engine.load(Load(weights=spoilt, version=make_version(1, 60), step=1))
    found = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert {name.partition(" of ")[0] for name in found.wrong} >= {"model.layers.1.mlp.gate_up_proj.weight_scale"}


async def test_what_changed_alone_is_not_written_in_place(served: Served) -> None:
    """A scale is that of many weights: all of them are loaded."""
    first = make_version(1, 70)
    await served.engine.load(Load(weights=served.mirror(0), version=first, step=1))
    changed = Changed(since=first, elements={}, whole=("model.norm.weight",))
    await served.engine.load(Load(weights=served.mirror(1), version=first + 1, step=2, changed=changed))
    found = await served.engine.read_back(served.mirror(1), number=1, num_parts=1)
    assert found.wrong == ()
