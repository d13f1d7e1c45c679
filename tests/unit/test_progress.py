"""What a part says of its waits."""

from __future__ import annotations

import pytest

from streamrl.telemetry.progress import Progress, Wait


def test_waits_are_added_up_by_cause_until_they_are_taken() -> None:
    now = 100.0
    progress = Progress(part="learner/0", role="learner", clock=lambda: now)
    for wait, seconds in ((Wait.GROUPS, 2.0), (Wait.STRAGGLERS, 1.0), (Wait.GROUPS, 0.5)):
        with progress.waiting(wait):
            now += seconds
        now += 10
    assert progress.take_waits() == pytest.approx({Wait.GROUPS: 2.5, Wait.STRAGGLERS: 1.0})
    assert progress.take_waits() == {}
