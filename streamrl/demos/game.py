"""The game: a small model learns to find a number in several turns, from the feedback after each guess.

    the model     25        38        31        34
    feedback         >         <         >         (found)         `>`: the number is larger

Seven guesses find any of 50 numbers if each halves what is left; a player who ignores the feedback finds one in seven.
The model is warmed up on timid players, who obey all feedback and mostly guess near an end of what is left: they find
one in three. A reward for each guess teaches the rest: nothing for an excluded number, half for any other, and up to
another half for how evenly it splits what is left. Each turn has its own advantage (`algorithm.advantages: turns`).
Whether the number was found is read from the transcript and only counted: a player who halves what is left finds it.

Model and files are made as in the quickstart, with its vocabulary. `Guess` is an ordinary environment:
`environment.target: streamrl.demos.game:Guess`, an instance for each rollout, in a limited process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.config.load import as_overrides
from streamrl.config.schema import Config
from streamrl.demos.quickstart import END, FALLING, RISING, warm_up, write_base_model
from streamrl.demos.report import Showcase, Trial
from streamrl.demos.run import run_all, write_rows
from streamrl.ops.launch.forking import PartsAhead

LOWEST, HIGHEST = 1, 50
NUM_GUESSES = 7
SMALLER, LARGER = RISING, FALLING  # the signs are `<` and `>`: the number compared with the guess
PROMPT = f"{LOWEST}{SMALLER}{HIGHEST}"
_TIMID, _NEAR = 0.75, 0.06  # share of a timid player's guesses near an end, and how near as a share of what is left
_NUM_DEMONSTRATIONS = 40_000  # with 16,000 it learns the rules less well, and later improves half as fast
_REPEATS = 40  # per number in the training rows: enough for the run


class Guess:
    """The environment; the number is the row's `answer`."""

    def __init__(self) -> None:
        self._number = self._num_guesses = 0
        self._low, self._high = LOWEST, HIGHEST  # what the feedback leaves

    def reset(self, row: Mapping[str, Any]) -> None:
        self._number = int(row["answer"])

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        guess = int(completion) if completion.isdigit() else -1
        self._num_guesses += 1
        if not LOWEST <= guess <= HIGHEST:
            return None, 0.0, True  # anything but a valid guess loses at once
        worth = self._worth(guess)
        if guess <= self._number:
            self._low = max(self._low, min(guess + 1, self._number))
        if guess >= self._number:
            self._high = min(self._high, max(guess - 1, self._number))
        if guess == self._number or self._num_guesses == NUM_GUESSES:
            return None, worth, True
        return LARGER if self._number > guess else SMALLER, worth, False

    def _worth(self, guess: int) -> float:
        if not self._low <= guess <= self._high:
            return 0.0
        below, above = guess - self._low, self._high - guess
        return 1 - 0.5 * abs(below - above) / (below + 1 + above)


def demonstrate(number: int, rng: random.Random) -> str:
    """Return a timid player's guesses with the feedback, to the end of the game."""
    low, high, transcript = LOWEST, HIGHEST, []
    for turn in range(NUM_GUESSES):
        guess = rng.randint(low, high)
        if rng.random() < _TIMID:
            step = rng.randrange(max(1, round(_NEAR * (high - low + 1))))
            guess = rng.choice((low + step, high - step))
        transcript.append(str(guess))
        if guess == number or turn == NUM_GUESSES - 1:
            break
        is_larger = number > guess
        transcript.append(f"{END}{LARGER if is_larger else SMALLER}")
        low, high = (guess + 1, high) if is_larger else (low, guess - 1)
    return "".join(transcript)


def right(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """Reward 1 if the number was found; an ordinary reward function."""
    return float(found(completion, fields))


def prepare(config: Config, show: Callable[[str], None], trial: Trial, ahead: PartsAhead) -> list[str]:
    folder, seed = config.folder, config.seed
    show("writing the numbers and an untrained model")
    rng = random.Random(seed)
    numbers = range(LOWEST, HIGHEST + 1)
    write_rows(folder / "data" / "validation.jsonl", map(_row, numbers))
    write_rows(folder / "data" / "train.jsonl", map(_row, [*numbers] * _REPEATS))
    write_rows(folder / "data" / "demonstrations.jsonl", _demonstrations(rng))
    write_base_model(folder / "base", seed=seed)

    def meanwhile() -> None:
        ahead.begin(config)
        trial(_overrides(folder, model="base"))

    run_all([warm_up(folder, seed)], show, meanwhile=meanwhile)
    return _overrides(folder, model="sft")


def _overrides(folder: Path, *, model: str) -> list[str]:
    settings = {
        "model.path": str(folder / model),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.validation": str(folder / "data" / "validation.jsonl"),
    }
    return as_overrides(settings)


def _row(number: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "answer": str(number)}


def _demonstrations(rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(_NUM_DEMONSTRATIONS):
        yield {"prompt": PROMPT, "completion": demonstrate(rng.randint(LOWEST, HIGHEST), rng)}


def found(transcript: str, fields: Mapping[str, Any]) -> bool:
    """Whether the last guess is the number."""
    return transcript.replace(SMALLER, " ").replace(LARGER, " ").split()[-1:] == [fields["answer"]]


GAME = Showcase(
    name="game",
    explanation=(
        f"A game: find a number from {LOWEST} to {HIGHEST} in {NUM_GUESSES} guesses, by '{LARGER}' or '{SMALLER}'.",
        "Demonstrations follow the feedback, but guess timidly. Now rewards.",
    ),
    source="found",
    question=lambda _, fields: f"{LOWEST} to {HIGHEST}",
    is_right=found,
    check=lambda _: None,
    prepare=prepare,
    prepared="numbers and warm-up",
)
