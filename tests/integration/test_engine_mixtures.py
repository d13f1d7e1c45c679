"""A mixture of experts on real vLLM: what it answers after each load is what that version says, and that is proved.

On a CPU vLLM packs experts for its kernel, and by itself does so once: why, and the repair, in `vllm.loading.transfer`.
Greedy tokens, so that a test says the same each time: of tokens that experts share evenly any rounding may decide.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamrl.versions import make_version
from streamrl.workers.engines.base import Load
from tests.integration.engine_world import TOLERANCE, Served, assert_each_load_is_served, proving, started

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries; ours are watched by every other test
]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long)]
)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    made = Served.of_family(request.param, tmp_path_factory.mktemp("models"))
    async with started(made):
        await made.engine.load_decoy(made.mirror(0))  # as a worker begins
        yield made


async def test_after_each_load_logprobs_are_those_of_the_version_loaded(served: Served) -> None:
    await assert_each_load_is_served(served)


async def test_a_load_is_proved_experts_and_all(served: Served) -> None:
    mirror, version = served.mirror(1), make_version(1, 1)
    manifest, prover, progress = proving(served, version)
    await prover.rehearse(served.engine, mirror)
    before = await served.engine.read_back(mirror, number=1, num_parts=1)
    assert len(before.wrong) == before.num_read
    await served.engine.load(Load(weights=mirror, version=version, step=1))
    after = await served.engine.read_back(mirror, number=2, num_parts=1)
    assert (after.num_read, after.wrong, after.unreadable) == (before.num_read, (), ())
    await prover.check(served.engine, mirror, manifest)
    assert progress.report().detail["engine_off"] < TOLERANCE
