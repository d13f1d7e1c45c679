"""When the difference of engine and learner on fresh samples calls for somebody."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.types import RunInfo
from tests.launch_world import make_report, make_snapshot, step_record


def look(
    mismatches: Sequence[float | None], *, served: str = "float32", learned: str = "float32", **detail: float
) -> View:
    """After steps with these means over their fresh tokens; None: it had none."""
    config = json.dumps({"weights": {"dtype": served}, "model": {"dtype": learned}})
    records = [
        step_record(step, **({} if value is None else {"policy/fresh_mismatch": value}))
        for step, value in enumerate(mismatches)
    ]
    snapshot = make_snapshot(
        run=RunInfo(uid="uid", name="run", term=1, config_json=config, fingerprint="f", state="running"),
        reports=(make_report("learner/0"), make_report("worker/w", detail=detail)),
    )
    return build_view(snapshot, run_name="run", server="here", history=History.of(records))


def disagrees(view: View) -> bool:
    return "engine_disagrees" in {cause.name for cause in view.causes}


def test_a_difference_beyond_rounding_is_told_with_its_size_and_what_is_usual() -> None:
    view = look([0.02, 0.03, None, 0.04])
    [cause] = [cause for cause in view.causes if cause.name == "engine_disagrees"]
    assert (cause.level, view.verdict) == ("attention", "degraded")
    assert "0.03 apart" in cause.evidence
    assert "last 3 steps" in cause.evidence
    assert "in float32 up to 0.001 is usual" in cause.evidence


@pytest.mark.parametrize(
    ("served", "learned"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_the_coarser_of_the_two_types_says_what_is_usual(served: str, learned: str) -> None:
    assert not disagrees(look([0.03] * 20, served=served, learned=learned))
    assert disagrees(look([0.3] * 20, served=served, learned=learned))


def test_one_odd_batch_is_no_fault() -> None:
    assert not disagrees(look([1e-6, 9.0, 1e-6, 1e-6]))


def test_too_few_steps_say_nothing() -> None:
    assert not disagrees(look([9.0, 9.0]))
    assert not disagrees(look([None] * 30))


def test_what_is_long_over_is_forgotten() -> None:
    assert not disagrees(look([9.0] * 40 + [1e-6] * 20))


def test_a_model_whose_rounding_the_workers_found_to_be_large_may_differ_more() -> None:
    assert disagrees(look([0.3] * 5, served="bfloat16"))
    assert not disagrees(look([0.3] * 5, served="bfloat16", rounding=0.12))
    assert disagrees(look([0.3] * 5, served="bfloat16", rounding=0.01)), "never stricter than what was measured here"


def test_of_a_run_whose_settings_are_unknown_nothing_is_said() -> None:
    snapshot = make_snapshot(reports=(make_report("learner/0"),))
    records = [step_record(step, **{"policy/fresh_mismatch": 9.0}) for step in range(9)]
    assert not disagrees(build_view(snapshot, run_name="run", server="here", history=History.of(records)))
