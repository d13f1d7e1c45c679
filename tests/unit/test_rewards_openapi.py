"""The reward server against its own OpenAPI document: whatever it is sent, it answers as the document says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from starlette.applications import Starlette

from streamrl.workers.reward_server.batcher import Batcher, ScoringModelDouble
from streamrl.workers.reward_server.server import RewardApp


@pytest.fixture
def app() -> Starlette:
    model = ScoringModelDouble()
    return RewardApp(model, Batcher(model, max_delay_s=0.0, max_batch_tokens=1000), token=None).asgi()


@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_nothing_that_is_sent_makes_a_server_error_or_an_undocumented_answer(app: Starlette, kind: str) -> None:
    import schemathesis  # a third of a second, for this test alone
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    mode = schemathesis.GenerationMode(kind)
    operations = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert {operation.path for operation in operations} == {"/score", "/get_reward", "/health", "/metrics"}
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # they take nothing, so nothing can be wrong with it

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        def check(case: schemathesis.Case) -> None:
            # What a vocabulary and a model's length allow is no matter of the document, so some good data is refused.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()
