"""Engines of two processes, each with a part of the model: tensor and pipeline parallel, a mixture too, on real vLLM.

What holds of one process holds of them: each version is served as it is, loads come in mid sample, proofs see every
part, and none is left when the engine ends. On CPUs; on GPUs none of it ran.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import safetensors.torch

from streamrl.errors import EngineError, LoadRejected
from streamrl.versions import make_version
from streamrl.workers.engines.base import Load
from tests.helpers import wait_until_async
from tests.integration.engine_world import (
    TOLERANCE,
    Served,
    assert_a_load_comes_in_mid_sample,
    assert_each_load_is_served,
    proving,
    started,
)
from tests.tiny_models import make_model
from tests.worker_processes import alive, descendants, shared_by

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries; ours are watched by every other test
]

SPREAD = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2},
}


def made(how: str, folder: Path) -> Served:
    small = {"kv_cache_memory_bytes": 64 << 20, **SPREAD[how]}
    if how == "experts":
        return Served.of_family("qwen3_moe", folder, **small)
    folders = [make_model(folder / str(n), architecture="qwen2", tied=True, kv_heads=2, seed=n) for n in range(3)]
    return Served(folders, engine="vllm", engine_args=small)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SPREAD)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with started(made(request.param, tmp_path_factory.mktemp("models"))) as serving:
        await serving.engine.load_decoy(serving.mirror(0))  # as a worker begins
        ranks = ranks_here()
        assert len(ranks) == 2
        shared = shared_by(ranks)
        assert shared
        yield serving
    await gone(ranks)
    assert not [path for path in shared if path.exists()]


def ranks_here() -> set[int]:
    """Not the server that engines are forked from, nor what Python has of its own."""
    return {pid for pid in alive(descendants(os.getpid())) if "Worker_" in Path(f"/proc/{pid}/cmdline").read_text()}


async def gone(processes: set[int]) -> None:
    async def none() -> bool:
        return not alive(processes)

    await wait_until_async(none, description="its ranks have ended")


async def test_after_each_load_logprobs_are_those_of_the_version_loaded(served: Served) -> None:
    await assert_each_load_is_served(served)


async def test_a_load_comes_in_mid_sample(served: Served) -> None:
    await assert_a_load_comes_in_mid_sample(served)


async def test_a_load_is_proved_by_every_process(served: Served) -> None:
    mirror, version = served.mirror(1), make_version(1, 50)
    manifest, prover, progress = proving(served, version)
    await prover.rehearse(served.engine, mirror)
    before = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert len(before.wrong) == before.num_read
    assert {name.rpartition(" of ")[2] for name in before.wrong} == {"rank 0", "rank 1"}
    await served.engine.load(Load(weights=mirror, version=version, step=1))
    after = await served.engine.read_back(mirror, number=2, num_parts=1)
    assert (after.num_read, after.wrong, after.unreadable) == (before.num_read, (), ())
    await prover.check(served.engine, mirror, manifest)
    assert progress.report().detail["engine_off"] < TOLERANCE


async def test_what_the_second_process_alone_has_wrong_is_found(served: Served, tmp_path: Path) -> None:
    mirror, spoilt = served.mirror(1), tmp_path / "spoilt.safetensors"
    tensors = safetensors.torch.load_file(mirror)
    name = max(name for name in tensors if name.endswith("self_attn.o_proj.weight"))  # of the last layer
    tensors[name][0, -1] += 1.0  # in the last column, which is the last rank's
    safetensors.torch.save_file(tensors, spoilt)
    version = make_version(1, 51)
    manifest, prover, _ = proving(served, version)
    await served.engine.load(Load(weights=spoilt, version=version, step=1))
    found = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert found.wrong == (f"{name} of rank 1",)
    with pytest.raises(LoadRejected, match=r"o_proj\.weight of rank 1"):
        await prover.check(served.engine, mirror, manifest)


async def test_a_process_that_dies_takes_the_engine_with_it(tmp_path: Path) -> None:
    others = ranks_here()  # of the engine that serves all other tests
    async with started(made("tensor", tmp_path)) as serving:
        await serving.load(0)
        ranks = ranks_here() - others
        os.kill(max(ranks), 9)

        async def dead() -> bool:
            try:
                await serving.engine.check_alive()
            except EngineError:
                return True
            return False

        await wait_until_async(dead, description="the engine says that it is dead")
    await gone(ranks)
