"""Who is suspected of killing ranks, and when it is certain enough."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streamrl.learner.groups.quarantine import Quarantine
from tests.feed_world import FeedWorld, planned


def narrowed(suspects: Quarantine, *tickets: int) -> list[int]:
    return list(suspects.narrow(tickets))


class Lives:
    """Learners of one run, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._term = 0

    def next(self) -> Quarantine:
        self._term += 1
        return Quarantine(self._folder, term=self._term)

    def die_of(self, *tickets: int) -> None:
        self.next().begin([*tickets])


def test_a_run_without_deaths_trains_its_batches_as_they_are(tmp_path: Path) -> None:
    suspects = Lives(tmp_path).next()
    for _ in range(5):
        assert narrowed(suspects, 1, 2, 3) == [1, 2, 3]
        suspects.begin([1, 2, 3])
        suspects.survived()
    assert not suspects.holds(1)


def test_one_death_changes_nothing(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2, 3)
    assert narrowed(lives.next(), 1, 2, 3) == [1, 2, 3]


def test_after_two_deaths_the_groups_of_both_plans_are_trained_one_by_one(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2, 3)
    lives.die_of(2, 3, 4)
    suspects = lives.next()
    assert narrowed(suspects, 1, 2, 3, 4) == [2]
    suspects.begin([2])
    suspects.survived()
    assert narrowed(suspects, 1, 3, 4) == [3]
    suspects.begin([3])
    suspects.survived()
    assert narrowed(suspects, 1, 4, 5) == [1, 4, 5], "both have shown to be harmless"


def test_the_third_death_convicts_the_one_that_was_trained_alone(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2, 3)
    lives.die_of(1, 2, 3)
    suspects = lives.next()
    suspects.begin([1])
    suspects.survived()
    suspects.begin([2])  # and it dies
    after = lives.next()
    assert [after.holds(ticket) for ticket in (1, 2, 3)] == [False, True, False]
    assert narrowed(after, 3, 4, 5) == [3, 4, 5]


def test_who_is_convicted_stays_so_for_later_learners(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    for _ in range(3):
        lives.die_of(7)
    lives.next().begin([8])
    assert lives.next().holds(7)


def test_a_step_between_deaths_acquits(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2)
    suspects = lives.next()
    suspects.begin([1, 2])
    suspects.survived()
    suspects.begin([3, 4])  # and it dies
    assert narrowed(lives.next(), 3, 4) == [3, 4]


def test_plans_that_have_no_group_in_common_did_not_die_of_one(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2)
    lives.die_of(3, 4)
    assert narrowed(lives.next(), 3, 4) == [3, 4]


def test_a_death_between_steps_is_nobodys(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    for _ in range(5):
        suspects = lives.next()
        suspects.begin([1])
        suspects.survived()
    assert not lives.next().holds(1)


@pytest.mark.parametrize(("num_elsewhere", "num_deaths"), [(0, 3), (1, 4), (3, 6), (20, 6)])
def test_deaths_between_steps_make_it_take_more_deaths_to_convict_up_to_a_limit(
    tmp_path: Path, num_elsewhere: int, num_deaths: int
) -> None:
    lives = Lives(tmp_path)
    lives.die_of(7)
    for _ in range(num_elsewhere):
        lives.next()
    for _ in range(num_deaths - 1):
        learner = lives.next()
        assert not learner.holds(7)
        learner.begin([7])
    assert lives.next().holds(7)


def test_deaths_before_the_first_in_a_step_excuse_nobody(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    for _ in range(5):
        lives.next()
    for _ in range(3):
        lives.die_of(7)
    assert lives.next().holds(7)


def killed_all_the_time(folder: Path, *, deadly: int, seed: int) -> tuple[set[int], int]:
    """200 groups, 4 a step of one second, 2 s to come back, and a kill every 2 s on average: who is convicted, and how
    many learners it took."""
    rng = random.Random(seed)
    lives, left, convicted = Lives(folder), list(range(200)), set[int]()
    num_learners, kill_in_s = 0, 0.0
    while left:
        if kill_in_s <= 0:
            kill_in_s = rng.expovariate(0.5)
        learner, alive = lives.next(), True
        num_learners += 1
        kill_in_s -= 2.0
        while left and kill_in_s > 0 and alive:
            convicted |= set(filter(learner.holds, left))
            left = [ticket for ticket in left if ticket not in convicted]
            batch = learner.narrow(left[:4])
            learner.begin(batch)
            kill_in_s -= len(batch) / 4
            alive = kill_in_s > 0 and deadly not in batch
            if alive:
                learner.survived()
                left = [ticket for ticket in left if ticket not in batch]
    return convicted, num_learners


def test_who_is_killed_all_the_time_convicts_the_deadly_group_and_hardly_any_other(tmp_path: Path) -> None:
    innocent, num_learners = set[tuple[int, int]](), 0
    for seed in range(5):
        (folder := tmp_path / str(seed)).mkdir()
        convicted, num = killed_all_the_time(folder, deadly=50, seed=seed)
        assert 50 in convicted
        innocent |= {(seed, ticket) for ticket in convicted - {50}}
        num_learners += num
    assert num_learners > 300
    assert len(innocent) <= 1, "of 1,000 groups"


def test_what_a_replaced_learner_still_writes_is_not_believed(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    zombie, second = lives.next(), lives.next()
    second.begin([1])
    second.survived()
    zombie.begin([1])
    lives.die_of(1)
    assert narrowed(lives.next(), 1, 2) == [1, 2]


def test_a_note_that_cannot_be_read_is_no_note(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.die_of(1, 2)
    (tmp_path / "suspects" / "000001.json").write_text('{"plan": ')
    assert narrowed(lives.next(), 1, 2) == [1, 2]


def test_the_feed_notes_each_plan_narrows_it_to_a_suspect_and_drops_who_is_convicted(tmp_path: Path) -> None:
    world = FeedWorld(folder=tmp_path)
    assert world.plan() is None
    world.answer_all()
    for expected in ([0, 1], [0, 1], [0]):
        assert planned(world.plan(timeout_s=1.0)) == expected
        world.start()  # the ranks have died of it
    plan = world.plan(timeout_s=1.0)
    assert planned(plan) == [1, 2]
    assert plan is not None
    world.train(plan)
    metrics = world.feed.metrics()
    assert (metrics["stream/groups_trained"], metrics["stream/dropped/quarantined"]) == (2, 1)
    world.start()
    assert planned(world.plan(timeout_s=1.0)) == [1, 2], "a step was made in between"
