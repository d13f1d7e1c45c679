"""vLLM serves what the learner publishes, family by family: log-probs after two loads, the second in mid flight.

The truth is a plain forward pass of transformers in fp32. Parameters go by the names that the model gives them in
memory, as they are published, and not by those of its files.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from learner.policy.pretrained import load_model
from streamrl.config import schema
from streamrl.versions import make_version
from tests.tiny_families import make_family
from tests.worker_world import worker_config
from workers.engines.base import ENGINES, Engine, EngineSettings, SampleRequest
from workers.model import read_model

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-3
# The families that docs/models.md says are served; what is not tried yet joins them once it was.
SERVED = ("llama", "granite", "gpt2")
IDS = np.random.default_rng(3).integers(3, 45, 21, dtype=np.int32)


def make_engine(folder: Path) -> Engine:
    config = worker_config(threads=1, engine="vllm").model_copy(
        update={
            "weights": schema.Weights(dtype="float32"),
            "data": schema.Data(train="", max_prompt_tokens=100),
            "sampling": schema.Sampling(max_tokens=100),
        }
    )
    facts = read_model(str(folder), trust_remote_code=False)
    return ENGINES["vllm"](EngineSettings(model=facts, config=config, trust_remote_code=False, seed=1))


def published(folder: Path) -> Path:
    """The weights under the names of `named_parameters`, as they go out."""
    path = folder / "published.safetensors"
    tensors = {name: p.detach().clone() for name, p in load_model(str(folder)).named_parameters()}
    safetensors.torch.save_file(tensors, path)
    return path


def truth(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


async def worst_of_two_loads(family: str, folder: Path) -> list[float]:
    folders = [make_family(folder / str(n), family, seed=n) for n in range(3)]
    engine = make_engine(folders[0])
    await engine.start()
    try:
        off = []
        await engine.load(published(folders[1]), version=make_version(1, 0), step=0, kv_cache="salt")
        off.append(worst(await engine.logprobs(IDS), folders[1]))
        busy = asyncio.gather(*(engine.generate(sample(n)) for n in range(4)))
        await engine.load(published(folders[2]), version=make_version(1, 1), step=1, kv_cache="salt")
        off.append(worst(await engine.logprobs(IDS), folders[2]))
        await busy
        return off
    finally:
        await engine.stop()


def sample(number: int) -> SampleRequest:
    prompt = np.random.default_rng(number).integers(3, 45, 12, dtype=np.int32)
    sampling = schema.Sampling(max_tokens=64, min_tokens=64)
    return SampleRequest(request_id=f"sample-{number}", prompt_ids=prompt, sampling=sampling)


def worst(answered: object, folder: Path) -> float:
    return float(np.abs(np.asarray(answered) - truth(folder).numpy()).max())


@pytest.mark.parametrize("family", SERVED)
def test_a_family_serves_what_is_published_to_it(family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        off = asyncio.run(worst_of_two_loads(family, Path(folder)))
    assert max(off) <= TOLERANCE
