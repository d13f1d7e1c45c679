"""The game of the demonstration: who finds the number, who does not, and what a guess earns."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from streamrl.demos.game import HIGHEST, LARGER, LOWEST, NUM_GUESSES, SMALLER, Guess, demonstrate, found, right

NUMBERS = range(LOWEST, HIGHEST + 1)


def play(number: int, guess: Callable[[list[str]], int]) -> tuple[str, list[float]]:
    """The transcript, and what each turn has earned; `guess` sees what was told so far."""
    game, told, transcript = Guess(), list[str](), ""
    game.reset({"answer": str(number)})
    rewards = []
    while True:
        said = str(guess(told))
        given, reward, done = game.step(said)
        rewards.append(reward)
        transcript += said
        if done:
            return transcript, rewards
        assert given is not None
        told.append(given)
        transcript += given


def halving() -> Callable[[list[str]], int]:
    bounds = [LOWEST, HIGHEST]

    def guess(told: list[str]) -> int:
        middle = sum(bounds) // 2
        if told:
            bounds[told[-1] == SMALLER] = middle + (1 if told[-1] == LARGER else -1)
        return sum(bounds) // 2

    return guess


@pytest.mark.parametrize("number", NUMBERS)
def test_who_halves_what_is_left_finds_it_and_earns_most(number: int) -> None:
    transcript, rewards = play(number, halving())
    assert found(transcript, {"answer": str(number)})
    assert right("", transcript, [], {"answer": str(number)}) == 1.0
    assert len(rewards) <= 6
    assert all(reward >= 0.75 for reward in rewards)


def test_who_does_not_heed_what_he_is_told_finds_less_than_a_fifth() -> None:
    guesses = [25, 12, 37, 6, 18, 31, 44]
    found_by = [found(play(n, lambda told: guesses[len(told)])[0], {"answer": str(n)}) for n in NUMBERS]
    assert sum(found_by) / len(found_by) == NUM_GUESSES / len(NUMBERS) < 0.2


def test_demonstrations_find_more_than_who_heeds_nothing_and_less_than_two_fifths() -> None:
    rng = random.Random(0)
    shown = [(n, demonstrate(n, rng).replace("<eos>", "")) for n in NUMBERS for _ in range(100)]
    share = sum(found(transcript, {"answer": str(n)}) for n, transcript in shown) / len(shown)
    assert 0.25 < share < 0.4


def test_a_guess_outside_of_what_is_left_earns_nothing_and_what_is_no_guess_ends_the_game() -> None:
    game = Guess()
    game.reset({"answer": "30"})
    assert game.step("25") == (LARGER, 0.99, False)
    assert game.step("25") == (LARGER, 0.0, False)
    assert game.step("50") == (SMALLER, pytest.approx(13 / 25), False)
    assert game.step("38") == (SMALLER, pytest.approx(23.5 / 24), False)
    assert game.step("") == (None, 0.0, True)
    assert not found("25>50<38<", {"answer": "30"})
