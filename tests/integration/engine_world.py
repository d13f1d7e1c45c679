"""Engines with versions to serve, and the truth about these: what tests of engines stand on."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from streamrl.config import schema
from streamrl.protocol.weights.format import DType
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.wire.sample import Span
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.base import Engine, EngineSettings, Generated, KvCache, Load, SampleRequest, make_engine
from streamrl.workers.engines.hf_model import RowState, processed_logprobs
from streamrl.workers.engines.model import read_model
from streamrl.workers.hosts.first import Hosts
from streamrl.workers.proofs.proving import Prover, prover_of
from tests.tiny_families import make_family
from tests.tiny_models import CHARACTERS, Architecture, make_model
from tests.worker_world import worker_config

TOLERANCE = 1e-4
MAX_PROMPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    engine: str
    architecture: Architecture
    tied: bool

    def __str__(self) -> str:
        return f"{self.engine}-{self.architecture}-{'tied' if self.tied else 'untied'}"


CASES: list[Any] = [
    Case(engine="transformers", architecture="qwen2", tied=True),
    Case(engine="transformers", architecture="llama", tied=False),
    Case(engine="vllm", architecture="qwen2", tied=True),
    Case(engine="vllm", architecture="llama", tied=False),
    pytest.param(Case(engine="vllm", architecture="qwen2", tied=False), marks=pytest.mark.long),
    pytest.param(Case(engine="vllm", architecture="llama", tied=True), marks=pytest.mark.long),
]


class Served:
    """An engine, the versions it may serve, and what a plain forward pass of each says."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        engine: str,
        dtype: DType = "float32",
        engine_args: dict[str, Any] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.folders = folders
        self.facts = read_model(str(self.folders[0]), trust_remote_code=False)
        over = {} if hosts is None else {"hosts": hosts.num, "start_timeout_s": 1200.0}
        config = worker_config(threads=1, engine=engine, engine_args=engine_args or {}, **over)
        self.config = config.model_copy(
            update={
                "weights": schema.Weights(dtype=dtype),
                "data": schema.Data(train="", max_prompt_tokens=MAX_PROMPT),
                "sampling": schema.Sampling(max_tokens=200),
            }
        )
        self.hosts = hosts
        settings = EngineSettings(model=self.facts, config=self.config, seed=1, hosts=hosts)
        self.engine: Engine = make_engine(settings)
        self._num_loads = 0
        self._num_requests = 0

    @staticmethod
    def of(case: Case, folder: Path) -> Served:
        made = [make_model(folder / str(n), architecture=case.architecture, tied=case.tied, seed=n) for n in range(3)]
        return Served(made, engine=case.engine)

    @staticmethod
    def of_family(family: str, folder: Path, **engine_args: Any) -> Served:
        """On vLLM."""
        made = [make_family(folder / str(n), family, scale=0.2, seed=n) for n in range(3)]
        return Served(made, engine="vllm", engine_args=engine_args)

    @cached_property
    def models(self) -> list[Any]:
        return [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in self.folders]

    def mirror(self, model: int) -> Path:
        """As it is published: by the names that a model has in memory, which are not always those of its files."""
        path = self.folders[model] / "published.safetensors"
        if not path.exists():
            dtype = getattr(torch, self.config.weights.dtype)
            tensors = {name: p.detach().to(dtype, copy=True) for name, p in self.models[model].named_parameters()}
            safetensors.torch.save_file(tensors, path)
        return path

    async def load(self, model: int, kv_cache: KvCache = "salt", *, again: bool = False) -> int:
        """The version under which it is served: the next, or the same once more."""
        number = self._num_loads - again
        version, step = make_version(1, number), 100 + number
        await self.engine.load(Load(weights=self.mirror(model), version=version, step=step, kv_cache=kv_cache))
        self._num_loads = number + 1
        return version

    def request(self, prompt: Sequence[int], **sampling: Any) -> SampleRequest:
        self._num_requests += 1
        return SampleRequest(
            request_id=f"request-{self._num_requests}",
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            sampling=schema.Sampling(**{"max_tokens": 32, **sampling}),
        )

    async def sample(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Generated]:
        return await asyncio.gather(*(self.engine.generate(self.request(p, **sampling)) for p in prompts))

    def logits(self, model: int, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:  # [T, V]
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits: torch.Tensor = self.models[model](ids).logits[0, len(prompt) - 1 : -1]
        return logits

    def expected(
        self, logits: torch.Tensor, prompt: Sequence[int], response: Sequence[int], sampling: schema.Sampling
    ) -> torch.Tensor:  # [T]
        """Log-probs of the response under the distribution that these settings make of the logits."""
        rows = [RowState(sampling=sampling, num_tokens=t, seen=[*prompt, *response[:t]]) for t in range(len(response))]
        logprobs = processed_logprobs(logits, rows, self.facts.stop_ids)
        return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


@asynccontextmanager
async def started(served: Served) -> AsyncIterator[Served]:
    """Inside, its engine runs; after it nothing is left of it."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="engine-", dir="/tmp") as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", temporary)
        try:
            await served.engine.start()
            yield served
        finally:
            await served.engine.stop()
            os.environ.clear()  # vLLM is told, and tells its processes, through the environment
            os.environ.update(environment)
        assert os.listdir(temporary) == [], "an engine leaves nothing behind"


def proving(served: Served, version: int) -> tuple[Manifest, Prover, Progress]:
    """What a worker has to prove that this version is served, and where it tells what it found."""
    canary_ids = tuple(prompts(1, seed=7)[0])
    manifest = Manifest(version=version, base=0, step=0, run_uid="run", tensors=(), shards=(), canary_ids=canary_ids)
    progress = Progress(part="worker/0", role="worker")
    return manifest, prover_of(served.config, served.facts, progress), progress


async def assert_each_load_is_served(served: Served) -> None:
    """After each its log-probs are those of the version loaded, and of no other."""
    asked, greedy = prompts(12, seed=1), schema.Sampling(max_tokens=32, greedy=True)
    for model in (0, 1, 2, 0):
        version = await served.load(model)
        for prompt, got in zip(asked, await served.sample(asked, greedy=True), strict=True):
            response = got.token_ids.tolist()
            of_it, of_another = (
                served.expected(served.logits(one, prompt, response), prompt, response, greedy)
                for one in (model, (model + 1) % 3)
            )
            assert worst(got, of_it) <= TOLERANCE
            assert worst(got, of_another) > 100 * TOLERANCE
            step = 100 + version - make_version(1, 0)
            assert got.spans == (Span(version=version, step=step, start=0, end=len(response)),)


async def assert_a_load_comes_in_mid_sample(served: Served, *, count: int = 4, length: int = 150) -> None:
    """With a cleared cache, each token's logprob is that of the version that sampled it."""
    first, asked = await served.load(0), prompts(count, seed=2)
    requests = [served.request(prompt, max_tokens=length, min_tokens=length) for prompt in asked]
    long = asyncio.gather(*map(served.engine.generate, requests))
    await served.sample(prompts(1, seed=3), max_tokens=20, min_tokens=20)  # by then the others have come as far
    second = await served.load(1, "clear")

    sampling = schema.Sampling(max_tokens=length, min_tokens=length)
    for prompt, got in zip(asked, await long, strict=True):
        assert [span.version for span in got.spans] == [first, second]
        response, switch = got.token_ids.tolist(), got.spans[1].start
        old, new = (served.logits(model, prompt, response) for model in (0, 1))
        expected = served.expected(torch.cat([old[:switch], new[switch:]]), prompt, response, sampling)
        assert worst(got, expected) <= TOLERANCE


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Of several lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 3 + len(CHARACTERS), size=rng.integers(2, 20)).tolist() for _ in range(count)]


def worst(generated: Generated, expected: torch.Tensor) -> float:
    return float(np.abs(generated.logprobs - expected.numpy()).max())
