"""An engine over two hosts, on real vLLM: tensor and pipeline parallel, a rank on each, which find each other over TCP.

The further host is a process of its own on this machine, with weights of its own. On CPUs; on GPUs none of it ran.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import safetensors.torch

from streamrl.errors import EngineError, LoadRejected
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.base import KvCache, Load
from streamrl.workers.hosts.first import Hosts, open_hosts
from tests.helpers import wait_until_async
from tests.hosts_world import RUN_UID, SECRET
from tests.integration.engine_world import (
    Served,
    assert_a_load_comes_in_mid_sample,
    assert_each_load_is_served,
    prompts,
    proving,
    started,
)
from tests.tiny_models import make_model
from tests.worker_processes import ROOT, alive, descendants

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries; ours are watched by every other test
]

SPREAD = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
START_S = 1200.0


class OverHosts(Served):
    """Each load is brought to the further host first."""

    def __init__(self, folders: list[Path], *, hosts: Hosts, other: Path, **engine_args: Any) -> None:
        super().__init__(folders, engine="vllm", engine_args=engine_args, hosts=hosts)
        self.further_hosts, self.other = hosts, other

    async def load(self, model: int, kv_cache: KvCache = "salt", *, again: bool = False) -> int:
        await self.bring(model, make_version(1, self._num_loads - again))
        return await super().load(model, kv_cache, again=again)

    async def bring(self, model: int, version: int) -> None:
        shutil.copyfile(self.mirror(model), self.other / f"{version}.safetensors")
        await self.further_hosts.bring(version)


@contextmanager
def further_host(served: OverHosts) -> Iterator[subprocess.Popen[bytes]]:
    config, model = served.config.model_dump_json(), str(served.folders[0])
    words = [served.further_hosts.address, model, config, str(served.other)]
    process = subprocess.Popen([sys.executable, "-m", "tests.integration.lone_host", *words], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SPREAD)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OverHosts]:
    folder = tmp_path_factory.mktemp("models")
    folders = [make_model(folder / str(n), architecture="qwen2", tied=True, kv_heads=2, seed=n) for n in range(3)]
    progress = Progress(part="worker/0", role="worker")
    hosts = Hosts(num=2, secret=SECRET, run_uid=RUN_UID, progress=progress, start_timeout_s=START_S)
    (folder / "other").mkdir()
    async with open_hosts(hosts, ("127.0.0.1", 0)):
        over = OverHosts(
            folders, hosts=hosts, other=folder / "other", kv_cache_memory_bytes=64 << 20, **SPREAD[request.param]
        )
        with further_host(over) as process:
            async with started(over):
                await over.bring(0, make_version(1, 900))
                await over.engine.load_decoy(over.mirror(0))  # as a worker begins
                yield over
                await the_death_of_the_further_host_ends_the_engine(over, process)


async def the_death_of_the_further_host_ends_the_engine(served: OverHosts, process: subprocess.Popen[bytes]) -> None:
    ranks = descendants(process.pid)
    asked = asyncio.gather(*(served.engine.generate(served.request(p, max_tokens=190)) for p in prompts(4, seed=9)))
    process.kill()
    began = time.monotonic()

    async def used() -> None:
        await asked
        while True:
            await served.engine.check_alive()

    with pytest.raises(EngineError, match=r"host 2 of 2 \(further on .*is lost: its connection"):
        await used()
    assert time.monotonic() - began < 30

    async def none() -> bool:
        return not alive(ranks)

    await wait_until_async(none, description="its ranks have ended")


async def test_after_each_load_logprobs_are_those_of_the_version_loaded(served: OverHosts) -> None:
    await assert_each_load_is_served(served)


async def test_greedy_tokens_are_those_of_a_plain_forward_pass(served: OverHosts) -> None:
    await served.load(1)
    asked = prompts(4, seed=5)
    for prompt, got in zip(asked, await served.sample(asked, greedy=True, max_tokens=20), strict=True):
        response = got.token_ids.tolist()
        assert served.logits(1, prompt, response)[1:].argmax(-1).tolist() == response[1:]  # the first may be no end


async def test_a_load_comes_in_mid_sample(served: OverHosts) -> None:
    await assert_a_load_comes_in_mid_sample(served)


async def test_a_tensor_that_is_wrong_on_the_further_host_alone_is_named_with_it(served: OverHosts) -> None:
    version, mirror = make_version(1, 901), served.mirror(1)
    tensors = safetensors.torch.load_file(mirror)
    name = max(name for name in tensors if name.endswith("self_attn.o_proj.weight"))  # of the last layer
    tensors[name][0, -1] += 1.0  # in the last column, which is the last rank's
    published = served.other / f"{version}.safetensors"
    safetensors.torch.save_file(tensors, published)
    await served.further_hosts.bring(version)
    await served.engine.load(Load(weights=mirror, version=version, step=1))
    await served.bring(1, version)  # what it should have loaded
    manifest, prover, _ = proving(served, version)
    found = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert [one.partition(" (")[0] for one in found.wrong] == [f"{name} of rank 1, host 2 of 2"]
    with pytest.raises(LoadRejected, match=r"o_proj\.weight of rank 1, host 2 of 2 \(further on "):
        await prover.check(served.engine, mirror, manifest)


async def test_a_version_that_the_further_host_does_not_hold_is_not_loaded(served: OverHosts) -> None:
    await served.bring(0, make_version(1, 902))
    with pytest.raises(EngineError, match=r"holds 1\.902 of the weights, not 1\.903"):
        await served.engine.load(Load(weights=served.mirror(0), version=make_version(1, 903), step=1))
