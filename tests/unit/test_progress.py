"""What a part says of its waits."""

from __future__ import annotations

import pytest

from streamrl.telemetry.progress import Progress, Wait


def test_waits_are_added_up_by_cause_until_they_are_taken() -> None:
    now = 100.0
    progress = Progress(part="learner/0", role="learner", timer=lambda: now)
    for wait, seconds in ((Wait.GROUPS, 2.0), (Wait.STRAGGLERS, 1.0), (Wait.GROUPS, 0.5)):
        with progress.waiting(wait):
            now += seconds
        now += 10
    assert progress.take_waits() == pytest.approx({Wait.GROUPS: 2.5, Wait.STRAGGLERS: 1.0})
    assert progress.take_waits() == {}


def test_a_new_activity_is_progress_and_another_attempt_at_the_same_is_none() -> None:
    now = 100.0
    progress = Progress(part="learner/0", role="learner", clock=lambda: now, timer=lambda: now)
    progress.working("publish")
    now += 20
    with progress.waiting(Wait.WEIGHTS):
        now += 5
    progress.working("publish")
    assert (progress.report().doing, progress.report().last_progress) == ("publish", 100.0)
    progress.working("train")
    assert (progress.report().since, progress.report().last_progress) == (125.0, 125.0)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_no_wait_and_no_age(jump_s: float) -> None:
    passed, wrong = 0.0, 0.0
    progress = Progress(
        part="learner/0", role="learner", clock=lambda: 1e6 + passed + wrong, timer=lambda: 50.0 + passed
    )
    progress.working("train")
    passed += 5
    with progress.waiting(Wait.GROUPS):
        passed += 2
        wrong = jump_s
        report = progress.report()
        assert report.at == 1e6 + 7 + jump_s
        assert (report.at - report.since, report.at - report.last_progress) == (2.0, 7.0)
    assert progress.take_waits() == {Wait.GROUPS: 2.0}
