"""What the bench of a serving engine makes of its rounds."""

from __future__ import annotations

import pytest

from bench.report import Bar
from bench.serving import Round, Update, lines_of
from streamrl.workers.engines.base import KvCache

ALL: list[KvCache] = ["salt", "clear", "keep"]


def update(*, served_after_s: float, paused_s: float = 0.2, lost: float = 10.0) -> Update:
    return Update(served_after_s=served_after_s, paused_s=paused_s, lost=lost, calm=100.0, num_bytes=2_000_000)


def test_bars_compare_each_update_with_the_reload_beside_it() -> None:
    slow_machine = Round(
        ours={name: update(served_after_s=0.6, paused_s=0.4) for name in ALL},
        own_s=dict.fromkeys(ALL, 0.6),
        checkpoint=update(served_after_s=3.0),
    )
    fast_machine = Round(
        ours={name: update(served_after_s=0.1) for name in ALL},
        own_s=dict.fromkeys(ALL, 0.1),
        checkpoint=update(served_after_s=1.0),
    )

    lines = {line.name: line for line in lines_of([slow_machine, fast_machine, fast_machine])}

    served = lines["publish to serving / own reload"]
    paused = lines["generation paused / own reload"]
    assert isinstance(served, Bar)
    assert isinstance(paused, Bar)
    assert (served.value, served.goal, served.ok) == (pytest.approx(1.0), 1.0, True)
    assert (paused.value, paused.goal, paused.ok) == (pytest.approx(2.0), 0.2, False)
    assert lines["whole checkpoint: publish to serving"].value == 1.0


def test_what_an_update_costs_is_told_for_each_policy() -> None:
    policies: dict[KvCache, float] = {"salt": 20.0, "clear": 80.0, "keep": 5.0}
    one = Round(
        ours={name: update(served_after_s=0.4, lost=lost) for name, lost in policies.items()},
        own_s=dict.fromkeys(policies, 0.1),
        checkpoint=update(served_after_s=1.0, lost=30.0),
    )

    lines = {line.name: (line.value, line.unit) for line in lines_of([one])}

    for name, lost in policies.items():
        assert lines[f"lost in the second after an update, {name}"] == (lost, "tokens/s")
    assert lines["whole checkpoint: bytes"] == (2.0, "MB")
