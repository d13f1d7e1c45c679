"""The figures of vLLM's scheduler, from what it says after each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streamrl.workers.engines.vllm.steps import StepWatch


def step(*, drafted: int = 0, accepted: int = 0, speculates: bool = True) -> Any:
    drafts = SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted) if speculates else None
    figures = SimpleNamespace(num_running_reqs=3, kv_cache_usage=0.25, spec_decoding_stats=drafts)
    return SimpleNamespace(outputs=[SimpleNamespace(new_token_ids=[1, 2])], scheduler_stats=figures)


def test_tokens_requests_and_cache_are_those_of_the_latest_step() -> None:
    watch = StepWatch()
    watch.record(step(speculates=False))
    watch.record(step(speculates=False))
    assert (watch.num_made, watch.num_running, watch.kv_used, watch.drafts_accepted) == (4, 3, 0.25, None)


def test_accepted_drafts_are_a_share_of_the_latest_ones() -> None:
    watch = StepWatch()
    watch.record(step())
    assert watch.drafts_accepted is None
    for _ in range(100):
        watch.record(step(drafted=1000, accepted=800))
    assert watch.drafts_accepted == 0.8
    for _ in range(100):
        watch.record(step(drafted=1000, accepted=100))  # the model has moved away from its draft
    assert watch.drafts_accepted is not None
    assert 0.1 <= watch.drafts_accepted < 0.15
