"""Datasets mixed by weight: what a pass asks for, in which order, and that nothing but numbers decides it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.groups.mixture import MixedDataset, Mixture


def a_pass(mixture: Mixture, number: int) -> list[int]:
    first = number * mixture.num_places
    located = [mixture.locate(place) for place in range(first, first + mixture.num_places)]
    assert {data_epoch for data_epoch, _ in located} == {number}
    return [row for _, row in located]


@pytest.mark.parametrize(
    ("num_rows", "weight", "num_places"), [(10, 1.0, 10), (10, 2.0, 20), (10, 0.5, 5), (5, 0.5, 3), (10, 0.001, 1)]
)
def test_a_pass_asks_for_weight_times_the_rows_and_one_at_least(num_rows: int, weight: float, num_places: int) -> None:
    assert MixedDataset(num_rows=num_rows, weight=weight).num_places == num_places


def test_proportions_hold_in_every_pass() -> None:
    mixture = Mixture(
        [MixedDataset(num_rows=10, weight=2.0), MixedDataset(num_rows=40, weight=0.25)], seed=1, shuffle=True
    )
    for number in range(6):
        counts = Counter(a_pass(mixture, number))
        assert [counts[row] for row in range(10)] == [2] * 10
        of_second = {row: count for row, count in counts.items() if row >= 10}
        assert sorted(of_second.values()) == [1] * 10


parts_drawn = st.lists(
    st.builds(MixedDataset, num_rows=st.integers(1, 12), weight=st.floats(0.05, 3.5)), min_size=1, max_size=3
)


@given(parts=parts_drawn, seed=st.integers(0, 99), shuffle=st.booleans(), num_passes=st.integers(1, 8))
def test_no_row_comes_more_than_once_more_often_than_another_of_its_dataset(
    parts: list[MixedDataset], seed: int, shuffle: bool, num_passes: int
) -> None:
    mixture = Mixture(parts, seed=seed, shuffle=shuffle)
    counts: Counter[int] = Counter()
    for number in range(num_passes):
        rows = a_pass(mixture, number)
        counts.update(rows)
        first = 0
        for part in parts:
            of_part = range(first, first + part.num_rows)
            assert sum(row in of_part for row in rows) == part.num_places
            assert max(counts[row] for row in of_part) - min(counts[row] for row in of_part) <= 1
            first += part.num_rows


def test_half_of_a_dataset_is_another_half_in_the_next_pass_and_drawn_by_the_seed() -> None:
    halves = []
    for seed in (1, 2):
        mixture = Mixture([MixedDataset(num_rows=20, weight=0.5)], seed=seed, shuffle=True)
        first, second, third = (a_pass(mixture, number) for number in range(3))
        assert set(first) | set(second) == set(range(20))
        assert set(third) == set(first)
        assert third != first, "each pass has an order of its own"
        halves.append(frozenset(first))
    assert halves[0] != halves[1]
    assert frozenset(range(10)) not in halves


def test_datasets_of_one_size_are_not_drawn_alike() -> None:
    mixture = Mixture([MixedDataset(num_rows=30, weight=0.5)] * 2, seed=1, shuffle=True)
    rows = a_pass(mixture, 0)
    assert {row for row in rows if row < 30} != {row - 30 for row in rows if row >= 30}


def test_shuffled_datasets_are_mixed_within_a_pass() -> None:
    mixture = Mixture([MixedDataset(num_rows=500), MixedDataset(num_rows=500)], seed=1, shuffle=True)
    of_first = np.array(a_pass(mixture, 0)) < 500
    assert all(0.3 < of_first[start : start + 100].mean() < 0.7 for start in range(0, 1000, 100))


def test_without_shuffling_each_dataset_keeps_its_order_and_is_spread_evenly() -> None:
    mixture = Mixture([MixedDataset(num_rows=2), MixedDataset(num_rows=8, weight=0.5)], seed=1, shuffle=False)
    assert a_pass(mixture, 0) == [2, 0, 3, 4, 1, 5]
    assert a_pass(mixture, 1) == [6, 0, 7, 8, 1, 9]


def test_what_a_place_stands_for_does_not_depend_on_what_was_asked_before() -> None:
    parts = [MixedDataset(num_rows=7, weight=1.5), MixedDataset(num_rows=9, weight=0.4)]
    forwards, backwards = (Mixture(parts, seed=3, shuffle=True) for _ in range(2))
    places = range(5 * forwards.num_places)
    expected = {place: forwards.locate(place) for place in places}
    assert {place: backwards.locate(place) for place in reversed(places)} == expected


def test_the_order_of_a_mixture_is_pinned_since_running_jobs_depend_on_it() -> None:
    mixture = Mixture([MixedDataset(num_rows=3), MixedDataset(num_rows=4, weight=0.5)], seed=1234, shuffle=True)
    assert [a_pass(mixture, number) for number in range(3)] == [[6, 0, 1, 4, 2], [0, 3, 2, 1, 5], [2, 0, 6, 1, 4]]
