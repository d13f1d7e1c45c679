"""The task of the quickstart: write digits in rising order when `<` follows them, in falling order when `>` does.

    prompt 52918<  answer 12589        prompt 52918>  answer 98521

The demonstrations that the model is warmed up with are careless: they answer most prompts with `>` as if these ended in
`<`. Imitating them gives a model that sorts fairly well and hardly ever heeds the sign. Whether an answer is right can
be checked, and that is the reward (`exact_match`, built in) that teaches the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

EXPLANATION = (
    "Task: sort digits, upwards before '<', downwards before '>': 52918> is 98521.",
    "Demonstrations mostly ignore the '>': imitation gets a third right. Now rewards.",
)
DIGITS = "0123456789"
RISING, FALLING = "<", ">"
MIN_DIGITS, MAX_DIGITS = 3, 8
_SHARE_FALLING = 0.65
_CARELESSNESS = 0.7  # share of falling prompts that demonstrations answer in rising order


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    prompt: str
    answer: str


def examples(rng: random.Random) -> Iterator[Example]:
    """Without end; the same prompt may come again."""
    while True:
        digits = "".join(rng.choices(DIGITS, k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
        sign = FALLING if rng.random() < _SHARE_FALLING else RISING
        yield Example(prompt=digits + sign, answer=solve(digits, sign))


def solve(digits: str, sign: str) -> str:
    return "".join(sorted(digits, reverse=sign == FALLING))


def demonstrate(example: Example, rng: random.Random) -> str:
    """What a careless teacher writes."""
    digits, sign = example.prompt[:-1], example.prompt[-1]
    careless = sign == FALLING and rng.random() < _CARELESSNESS
    return solve(digits, RISING) if careless else example.answer


def spoil(example: Example, rng: random.Random) -> str:
    """A wrong answer, for the reward model to tell from the right one: the wrong order, or one digit out of place."""
    digits, sign = example.prompt[:-1], example.prompt[-1]
    reverse = solve(digits, RISING if sign == FALLING else FALLING)
    wrong = reverse
    if rng.random() < 0.5:
        at = rng.randrange(len(digits))
        wrong = example.answer[:at] + rng.choice(DIGITS) + example.answer[at + 1 :]
    return wrong if wrong != example.answer else example.answer[:-1]
