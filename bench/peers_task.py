"""The task of the peers: count down to zero, by ones when `<` follows the number, by twos when `>` does.

    prompt 07<  answer 06050403020100        prompt 07>  answer 050301

Where one starts is log-normal, so answers are of long-tailed lengths: half have less than a dozen digits, a few more
than a hundred, and the longest of a step has four times the mean. The demonstrations that the model is warmed up with
are careless: they answer most prompts with `>` by ones. So it can count both ways, from everywhere, and has to learn
when: what one prompt teaches holds for all. The reward is the share of numbers that are right. Python's own library
alone: both peers import this file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

LONGEST = 199  # tokens: all numbers below 99, of two digits each, and the end
_BY_ONES, _BY_TWOS = "<", ">"
_LEAST, _MEDIAN, _SPREAD, _MOST = 2, 8, 1.2, 99  # the spread is that of the logarithm
_WIDTH = 2
_SHARE_BY_TWOS = 0.8
_CARELESSNESS = 0.7  # share of demonstrations by twos that go by ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    prompt: str
    answer: str


def examples(rng: random.Random) -> Iterator[Example]:
    """Without end."""
    while True:
        drawn = _MEDIAN * math.exp(rng.gauss(0.0, _SPREAD))
        yield _example(min(_MOST, max(_LEAST, round(drawn))), rng)


def lessons(rng: random.Random) -> Iterator[Example]:
    """Without end: every other one starts anywhere, for large numbers are too rare to learn from examples alone."""
    for example in examples(rng):
        yield example
        yield _example(rng.randint(_LEAST, _MOST), rng)


def demonstrate(example: Example, rng: random.Random) -> str:
    """What a careless teacher writes."""
    careless = example.prompt.endswith(_BY_TWOS) and rng.random() < _CARELESSNESS
    return _count_down(int(example.prompt[:-1]), _BY_ONES) if careless else example.answer


def reward(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """The share of numbers that stand where they should; what is missing or too much is wrong."""
    pairs = list(zip_longest(_numbers(completion), _numbers(fields["answer"])))
    return sum(given == right for given, right in pairs) / len(pairs)


def _example(number: int, rng: random.Random) -> Example:
    sign = _BY_TWOS if rng.random() < _SHARE_BY_TWOS else _BY_ONES
    return Example(prompt=_digits(number) + sign, answer=_count_down(number, sign))


def _count_down(number: int, sign: str) -> str:
    step = 2 if sign == _BY_TWOS else 1
    return "".join(map(_digits, range(number - step, -1, -step)))


def _digits(number: int) -> str:
    return f"{number:0{_WIDTH}}"


def _numbers(text: str) -> list[str]:
    return [text[at : at + _WIDTH] for at in range(0, len(text), _WIDTH)]
