"""The peers' task: name the step that the prompt asks for, and count down to zero by it.

    prompt 07>1  answer 1 06050403020100        prompt 07>2  answer 2 050301        without the space

The starting number is log-normal, so answer lengths are long-tailed: half have less than a dozen digits, a few more
than a hundred, and the longest in a step has four times the mean. The warm-up demonstrations are careless: they answer
most prompts for twos by ones. So the model can count both ways from any number, and has to learn when to do which: what
it learns on one prompt applies to others. (Without the step as the first token it does not: each number is then learned
by itself.) The reward is the fraction of correct numbers. Every fifth number is held out: reinforcement has no prompt
that starts there. Only uses the standard library, since both peers import this file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

LONGEST = 200  # tokens: the step, all numbers below 99, two digits each, and the end token
_LEAST, _MEDIAN, _SPREAD, _MOST = 2, 8, 1.2, 99  # the spread is the sigma of the log-normal
_WIDTH = 2
_SHARE_BY_TWOS = 0.8
_EVERY_HELD_OUT, _FIRST_HELD_OUT = 5, 3
_CARELESSNESS = 0.7  # fraction of the demonstrations for twos that count by ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    prompt: str
    answer: str


def examples(rng: random.Random) -> Iterator[Example]:
    """Yield random examples endlessly."""
    while True:
        drawn = _MEDIAN * math.exp(rng.gauss(0.0, _SPREAD))
        yield _example(min(_MOST, max(_LEAST, round(drawn))), rng)


def is_held_out(example: Example) -> bool:
    return _start(example) % _EVERY_HELD_OUT == _FIRST_HELD_OUT


def lessons(rng: random.Random) -> Iterator[Example]:
    """Yield examples endlessly, every other one from a uniform start: large numbers are too rare otherwise."""
    for example in examples(rng):
        yield example
        yield _example(rng.randint(_LEAST, _MOST), rng)


def demonstrate(example: Example, rng: random.Random) -> str:
    """Return a careless teacher's answer."""
    careless = example.prompt.endswith("2") and rng.random() < _CARELESSNESS
    return _count_down(_start(example), 1) if careless else example.answer


def reward(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """Return the fraction of numbers in the right place; missing and extra numbers are wrong."""
    pairs = list(zip_longest(_numbers(completion[1:]), _numbers(fields["answer"][1:])))
    return sum(given == right for given, right in pairs) / len(pairs)


def _example(number: int, rng: random.Random) -> Example:
    step = 2 if rng.random() < _SHARE_BY_TWOS else 1
    return Example(prompt=f"{_digits(number)}>{step}", answer=_count_down(number, step))


def _start(example: Example) -> int:
    return int(example.prompt[:_WIDTH])


def _count_down(number: int, step: int) -> str:
    return str(step) + "".join(map(_digits, range(number - step, -1, -step)))


def _digits(number: int) -> str:
    return f"{number:0{_WIDTH}}"


def _numbers(text: str) -> list[str]:
    return [text[at : at + _WIDTH] for at in range(0, len(text), _WIDTH)]
