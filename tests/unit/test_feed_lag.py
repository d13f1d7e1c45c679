from __future__ import annotations

from typing import Any

import pytest

from streamrl.config import schema
from streamrl.learner.groups.lag import LagRule
from streamrl.versions import make_version
from tests.feed_world import FeedWorld, make_config, planned


def rule(**settings: Any) -> LagRule:
    return LagRule(schema.Lag(**settings))


def published(lag: LagRule, steps: range, *, term: int = 1) -> LagRule:
    for step in steps:
        lag.note(make_version(term, step), step)
    return lag


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_steps": 2, "stale": "drop"}, 2),
        ({"max_steps": 2, "stale": "keep", "hard_limit_steps": 5}, 5),
    ],
)
def test_a_group_is_stale_past_the_limit_of_the_setting(settings: dict[str, Any], limit: int) -> None:
    lag = published(rule(**settings), range(21))
    stale = [step for step in range(21) if lag.is_stale(make_version(1, step), make_version(1, step), 20)]
    assert stale == list(range(20 - limit))


def test_a_version_of_an_abandoned_lineage_is_not_punished() -> None:
    lag = LagRule(schema.Lag(max_steps=2, stale="drop"), known=[(make_version(1, 7), 7)])
    lag.note(make_version(2, 0), 8)
    assert not lag.is_stale(make_version(1, 9), make_version(1, 9), 8)
    lag.note(make_version(2, 10), 18)
    assert lag.is_stale(make_version(1, 5), make_version(1, 5), 18), "it is older than one that is past the limit"


def test_a_version_that_was_on_its_way_when_the_checkpoint_was_made_ages_as_the_one_before_it() -> None:
    """A learner that goes on from step 3 does not know version 3 of the one before, and of step 6 none is out."""
    known = published(rule(max_steps=2, stale="drop"), range(3)).known()
    lag = LagRule(schema.Lag(max_steps=2, stale="drop"), known=known)
    for n, step in enumerate((3, 4, 5)):
        lag.note(make_version(2, n), step)
    made_by = make_version(1, 3), make_version(1, 4)
    assert [lag.is_stale(*made_by, step) for step in (4, 6)] == [False, True]


def test_a_version_that_is_out_and_not_noted_yet_is_not_stale() -> None:
    lag = published(rule(max_steps=0, stale="drop"), range(3))
    assert not lag.is_stale(make_version(1, 3), make_version(1, 3), 3)


def test_after_a_start_from_scratch_groups_of_the_learner_before_are_not_punished() -> None:
    assert not published(rule(stale="drop"), range(3), term=2).is_stale(make_version(1, 0), make_version(1, 0), 2)


def test_a_group_without_tokens_is_never_stale() -> None:
    assert not published(rule(stale="drop"), range(50)).is_stale(0, 0, 50)


def test_before_anything_is_published_nothing_is_stale() -> None:
    assert not rule().is_stale(make_version(1, 0), make_version(1, 0), 0)
    assert rule().first_version() == (0, 0)


def test_only_as_many_versions_are_remembered_as_the_limit_needs() -> None:
    lag = published(rule(max_steps=4, stale="drop"), range(1000))
    assert len(lag.known()) == 6
    again = LagRule(schema.Lag(max_steps=4, stale="drop"), known=lag.known())
    assert again.known() == lag.known()
    assert again.is_stale(make_version(1, 994), make_version(1, 994), 999)
    assert not again.is_stale(make_version(1, 995), make_version(1, 995), 999)


@pytest.mark.parametrize(("window", "first"), [(0, 9), (3, 6), (50, 0)])
def test_a_worker_must_have_a_version_that_is_within_the_window(window: int, first: int) -> None:
    lag = published(rule(max_steps=window), range(10))
    assert lag.first_version() == (make_version(1, first), first)


@pytest.mark.parametrize("window", [0, 4])
def test_after_a_restart_a_worker_must_have_a_version_of_the_new_learner(window: int) -> None:
    before = published(rule(max_steps=window), range(51))  # and then 51 to 55, which were lost
    lag = LagRule(schema.Lag(max_steps=window), known=before.known())
    lag.note(make_version(2, 0), 50)
    lost = make_version(1, 55)
    assert lag.first_version() == (make_version(2, 0), 50)
    assert lost < lag.first_version()[0]
    lag.note(make_version(2, 1), 51)
    assert lag.first_version() == (make_version(2, 0 if window else 1), 50 if window else 51)


def test_versions_published_now_and_then_count_by_their_steps() -> None:
    lag = published(rule(max_steps=4), range(0, 31, 10))
    assert lag.first_version() == (make_version(1, 30), 30)


def test_masking_judges_a_group_by_its_youngest_tokens() -> None:
    lag = published(rule(max_steps=2, stale="mask"), range(21))
    old, young = make_version(1, 3), make_version(1, 18)
    assert not lag.is_stale(old, young, 20)
    assert lag.is_stale(old, make_version(1, 17), 20)


def test_waiting_begins_every_ticket_with_the_newest_weights() -> None:
    lag = published(rule(max_steps=4, stale="wait"), range(10))
    assert lag.first_version() == (make_version(1, 9), 9)


def test_waiting_has_fewer_tickets_out_the_older_the_newest_weights_are() -> None:
    lag = published(rule(max_steps=4, stale="wait"), range(10))
    assert [lag.batches_ahead(step) for step in (9, 10, 13, 14, 20)] == [5, 4, 1, 0, 0]
    assert published(rule(max_steps=4), range(10)).batches_ahead(20) == 5


def test_a_group_made_50_versions_ago_is_dropped_and_counted() -> None:
    world = FeedWorld(make_config(lag={"max_steps": 1, "stale": "drop"}), num_prompts=500)
    world.plan()
    for _ in range(50):
        world.step += 1
        world.publish()
    world.answer(0, version=make_version(1, 0))
    world.answer(1, version=make_version(1, 49))
    world.answer(2, version=make_version(1, 48))
    assert world.plan() is None
    assert world.feed.metrics()["stream/dropped/stale"] == 1, "the newest is of step 50"
    assert world.plan() is None
    assert world.feed.metrics()["stream/dropped/stale"] == 2
    world.answer(3, version=make_version(1, 50))
    assert planned(world.plan()) == [1, 3]
