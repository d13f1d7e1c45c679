from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.groups.numbering import NumberSet, Retries


def test_without_retries_a_number_is_its_place() -> None:
    assert [Retries().place(number) for number in range(3)] == [0, 1, 2]


def test_a_retry_has_the_place_of_the_dead_ticket_and_those_after_it_lose_none() -> None:
    retries = Retries({3: 1})
    assert [retries.place(number) for number in range(6)] == [0, 1, 2, 1, 3, 4]


def test_a_retry_of_a_retry_has_the_place_of_the_first() -> None:
    assert [Retries({3: 1, 5: 3}).place(number) for number in range(7)] == [0, 1, 2, 1, 3, 1, 4]


@given(st.lists(st.none() | st.integers(0, 1000), max_size=60))
def test_whatever_is_repeated_the_data_is_gone_through_in_order(choices: list[int | None]) -> None:
    retries = Retries()
    asked_for: list[int] = []  # the place of each number, by a model that counts
    next_place = 0
    for number, choice in enumerate(choices):
        if choice is None or number == 0:
            asked_for.append(next_place)
            next_place += 1
        else:
            retries.add(number, choice % number)
            asked_for.append(asked_for[choice % number])
    assert [retries.place(number) for number in range(len(choices))] == asked_for
    again = Retries(dict(reversed(retries.known().items())))
    assert [again.place(number) for number in range(len(choices))] == asked_for
    assert len(again) == len(choices) - next_place


def test_only_an_earlier_ticket_can_be_repeated() -> None:
    with pytest.raises(AssertionError, match="comes after it"):
        Retries().add(3, 3)
    with pytest.raises(AssertionError, match="retry already"):
        Retries({3: 1}).add(3, 2)


@given(st.permutations(range(40)), st.integers(0, 40))
def test_a_number_set_behaves_as_a_set_whatever_the_order(order: list[int], count: int) -> None:
    numbers, expected = NumberSet(), set(order[:count])
    for number in order[:count]:
        numbers.add(number)
    assert len(numbers) == len(expected)
    assert [n for n in range(42) if n in numbers] == sorted(expected)
    assert list(numbers.gaps(42)) == [n for n in range(42) if n not in expected]
    ranges = numbers.ranges()
    assert {n for start, end in ranges for n in range(start, end)} == expected
    assert all(end < start for (_, end), (start, _) in pairwise(ranges)), "ranges are merged"
    assert NumberSet(ranges).ranges() == ranges


def test_gaps_below_an_end_inside_the_set_stop_there() -> None:
    assert list(NumberSet(((2, 10),)).gaps(5)) == [0, 1]


def test_a_number_is_added_once() -> None:
    numbers = NumberSet(((0, 3),))
    with pytest.raises(AssertionError, match="already"):
        numbers.add(2)
