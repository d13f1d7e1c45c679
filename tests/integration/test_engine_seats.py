"""A canary is answered while long samples have all the seats that the run gave them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import wait_until_async
from tests.integration.engine_world import Served, prompts, started
from tests.tiny_models import make_model

_LENGTH = 6000  # tokens: half a minute, in which a canary is answered hundreds of times

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; ours are watched by every other test


async def test_a_canary_does_not_wait_for_samples_to_end(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "max_position_embeddings": 8192}))
    served = Served([folder], engine="vllm", engine_args={"max_num_seqs": 2, "max_model_len": 8192})
    async with started(served):
        await served.load(0)
        asked = [served.request(prompt, max_tokens=_LENGTH, min_tokens=_LENGTH) for prompt in prompts(4)]
        long = [asyncio.create_task(served.engine.generate(one)) for one in asked]

        async def two_run() -> bool:
            stats = served.engine.stats()
            return stats.num_made > 20 and stats.num_waiting == 2

        await wait_until_async(two_run, description="two samples are being generated, and two wait")
        answered = await served.engine.logprobs(np.asarray(prompts(1, seed=7)[0], dtype=np.int32))
        assert len(answered) == len(prompts(1, seed=7)[0]) - 1
        assert not any(sample.done() for sample in long)
        for sample in long:
            sample.cancel()
        await asyncio.gather(*long, return_exceptions=True)
