"""pass@k, the majority and the interval, against what they estimate."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from statistics import fmean

import pytest

from streamrl.recipe.held_out import (
    AnswerSearch,
    JudgedSample,
    Passing,
    completion_of,
    majority,
    mean_over_prompts,
    numbers_of_samples,
    pass_at,
    passes,
    wilson,
)


def judged(*samples: tuple[str | None, bool]) -> list[JudgedSample]:
    return [JudgedSample(answer=answer, passed=passed) for answer, passed in samples]


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 2), (6, 6), (8, 1)])
def test_pass_at_k_is_the_share_of_draws_of_k_samples_in_which_one_passes(num_samples: int, num_passed: int) -> None:
    samples = [True] * num_passed + [False] * (num_samples - num_passed)
    for k in range(1, num_samples + 1):
        share = fmean(any(draw) for draw in itertools.combinations(samples, k))
        assert pass_at(k, num_samples=num_samples, num_passed=num_passed) == pytest.approx(share)


def test_pass_at_k_is_told_for_powers_of_two_and_for_all_samples() -> None:
    assert [numbers_of_samples(most) for most in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    prompts = [judged((None, True), (None, False), (None, False)), judged(*[(None, False)] * 3)]
    assert passes(prompts, num_samples=3) == {
        k: Passing(share=pytest.approx(share), num_prompts=2) for k, share in ((1, 1 / 6), (2, 1 / 3), (3, 1 / 2))
    }
    assert passes([], num_samples=3) == {}


def test_a_sample_that_failed_takes_its_prompt_out_of_the_pass_at_k_that_needs_it_and_no_other() -> None:
    prompts = [judged(*[(None, True)] * 4), judged((None, False), (None, False), (None, False))]
    found = passes(prompts, num_samples=4)
    assert {k: (one.share, one.num_prompts) for k, one in found.items()} == {1: (0.5, 2), 2: (0.5, 2), 4: (1.0, 1)}
    assert list(passes(prompts, num_samples=8)) == [1, 2, 4]


def test_a_prompt_counts_the_same_however_many_of_its_samples_failed() -> None:
    assert mean_over_prompts([[1.0, 1.0, 1.0], [0.0], []]) == 0.5
    assert mean_over_prompts([[], []]) is None


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([("4", True), ("4", True), ("5", False)], 1.0),
        ([("4", True), ("5", False), ("5", False)], 0.0),
        ([("4", True), ("5", False)], 0.5),
        ([("4", True), (None, False), (None, False)], 1.0),
        ([(None, False)], 0.0),
    ],
)
def test_the_majoritys_answer_is_that_of_most_samples_that_gave_one(
    samples: list[tuple[str | None, bool]], share: float
) -> None:
    assert majority([judged(*samples)]) == share


def test_of_no_prompts_there_is_no_majority() -> None:
    assert majority([]) is None


@pytest.mark.parametrize(("share", "num_prompts"), [(0.0, 10), (0.5, 40), (0.93, 200), (1.0, 3)])
def test_the_intervals_ends_are_the_shares_that_are_just_not_refused(share: float, num_prompts: int) -> None:
    for end in wilson(share, num_prompts):
        assert 0 <= end <= 1
        if 1e-9 < end < 1 - 1e-9:
            assert abs(share - end) / math.sqrt(end * (1 - end) / num_prompts) == pytest.approx(1.959964, rel=1e-4)


def test_the_interval_holds_the_truth_in_95_of_100_samples() -> None:
    truth, num_prompts = 0.3, 50
    chances = [
        math.comb(num_prompts, k) * truth**k * (1 - truth) ** (num_prompts - k)
        for k in range(num_prompts + 1)
        if wilson(k / num_prompts, num_prompts)[0] <= truth <= wilson(k / num_prompts, num_prompts)[1]
    ]
    assert 0.93 <= sum(chances) <= 0.97


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["answer is ", "5", "###"], ("###",), "answer is 5"),
        (["answer is ", "5", "#", "##x"], ("###",), "answer is 5"),  # the last token completes it and goes on
        (["5", "\n\n"], ("\n",), "5"),
        (["a\n", "turn", "\n", "5", "\n"], ("\n",), "a\nturn\n5"),  # earlier turns ended by it, too
        (["no", " stop"], ("###",), "no stop"),
        ([], ("###",), ""),
    ],
)
def test_a_completion_ends_before_the_stop_string_that_ended_it(
    pieces: list[str], stop: tuple[str, ...], text: str
) -> None:
    def decode(token_ids: list[int]) -> str:
        return "".join(pieces[i] for i in token_ids)

    assert completion_of(list(range(len(pieces))), stop, decode) == text


def test_an_answer_is_the_patterns_last_match() -> None:
    assert AnswerSearch(r"#### ?(-?\d+)")("#### 3 and #### 72 ") == "72"
    assert AnswerSearch(r"\d")("3, then 4") == "4"
    assert AnswerSearch(r"\d")("none") is None


BOXED = r"\\boxed\{((?:[^{}]+|\{[^{}]*\})*)\}"
SLOW = r"(?:x|x)+y"


def test_an_answer_in_nested_braces_is_found() -> None:
    assert AnswerSearch(BOXED)(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"


@pytest.mark.filterwarnings("ignore:validation.answer")
@pytest.mark.parametrize("pattern", [BOXED, BOXED + "!", SLOW])
@pytest.mark.parametrize("text", ["\\boxed{" + "x" * 60, "\\boxed{" + "x" * 60 + "{}}", "x" * 60 + "!y"])
def test_no_pattern_searches_a_text_for_longer_than_a_moment(pattern: str, text: str) -> None:
    began = time.process_time()
    AnswerSearch(pattern)(text)
    assert time.process_time() - began < 3.0


def test_a_search_that_takes_too_long_finds_nothing_and_says_so_once_in_a_process() -> None:
    with warnings.catch_warnings(record=True, action="default") as shown:
        assert [AnswerSearch(SLOW)("x" * 60 + "!y") for _ in range(2)] == [None, None]
    assert ["validation.answer" in str(one.message) for one in shown] == [True]


@pytest.mark.filterwarnings("ignore:validation.answer")
def test_a_pattern_that_was_too_slow_often_enough_is_not_searched_any_more() -> None:
    """A validation of thousands of texts must end."""
    search = AnswerSearch(SLOW)
    assert search("xy") == "xy"
    began = time.process_time()
    assert [search("x" * 60 + "!y") for _ in range(200)] == [None] * 200
    assert time.process_time() - began < 30.0
    assert search("xy") is None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_interval_holds_its_share_whatever_the_rounding(share: float) -> None:
    bounds = [wilson(share, num_prompts) for num_prompts in range(1, 2000)]
    assert all(low <= share <= high for low, high in bounds)
