"""Judges that say which of two answers is better: both orders, beside what a row holds or others of the group."""

from __future__ import annotations

import pytest

from streamrl.errors import RewardError
from streamrl.workers.rewards.judge import neighbours
from tests.judging_world import Asked, Reply, fair, judge_of, judge_of_groups, judges_serving, rating
from tests.tiny_rewards import make_item


async def test_beside_what_the_row_holds_both_orders_are_asked() -> None:
    async with judges_serving() as server:
        reward = judge_of(server.url, form="pairwise", against="answer")
        assert await reward.score(make_item("0", answer="9")) == 1.0
        await reward.close()
    assert [asked.answers for asked in server.asked] in ([["9", "0"], ["0", "9"]], [["0", "9"], ["9", "0"]])


async def test_a_judge_that_likes_what_comes_first_teaches_nothing() -> None:
    async with judges_serving(lambda asked: Reply(content='{"better": "first"}')) as server:
        reward = judge_of_groups(server.url)
        assert await reward.score_group([make_item(str(i)) for i in range(4)]) == [0.5] * 4
        await reward.close()


async def test_in_a_group_each_has_the_share_of_comparisons_that_it_won() -> None:
    answers = ["0", "1", "5", "9"]
    assert [rating(answer) for answer in answers] == [9, 10, 4, 8]
    async with judges_serving() as server:
        reward = judge_of_groups(server.url, opponents=3)
        assert await reward.score_group(list(map(make_item, answers))) == pytest.approx([2 / 3, 1.0, 0.0, 1 / 3])
        assert await reward.score_group([make_item("0")]) == [0.5]
        await reward.close()
    assert len(server.asked) == 2 * 6


def test_neighbours_meet_once_and_everyone_meets_equally_many() -> None:
    for count, reach in ((1, 2), (2, 2), (3, 1), (8, 2), (8, 9)):
        pairs = neighbours(count, reach)
        assert len(set(pairs)) == len(pairs)
        met = [sum(i in pair for pair in pairs) for i in range(count)]
        assert set(met) == {min(2 * reach, count - 1)}


async def test_a_comparison_without_a_verdict_fails_its_two_samples_and_no_others() -> None:
    def picky(asked: Asked) -> Reply:
        return Reply(content="?") if {"0", "1"} == set(asked.answers) else fair(asked)

    async with judges_serving(picky) as server:
        reward = judge_of_groups(server.url, opponents=1, attempts=2)
        scores = await reward.score_group(list(map(make_item, ["0", "1", "5", "9"])))
        await reward.close()
    assert [isinstance(score, RewardError) for score in scores] == [True, True, False, False]


async def test_an_answer_that_no_judge_takes_fails_alone_and_the_others_are_compared_among_themselves() -> None:
    def squeamish(asked: Asked) -> Reply:
        return Reply(status=400, body=b"content filter") if "1" in asked.answers else fair(asked)

    async with judges_serving(squeamish) as server:
        reward = judge_of_groups(server.url)
        refused, *scores = await reward.score_group(list(map(make_item, ["1", "0", "5", "9"])))
        await reward.close()
    assert "content filter" in str(refused)
    assert scores == pytest.approx([1.0, 0.0, 0.5])


async def test_of_two_answers_that_cannot_be_compared_neither_has_a_score() -> None:
    async with judges_serving(lambda asked: Reply(status=400)) as server:
        reward = judge_of_groups(server.url)
        scores = await reward.score_group(list(map(make_item, ["0", "1"])))
        await reward.close()
    assert all(isinstance(score, RewardError) for score in scores)
