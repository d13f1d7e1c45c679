"""The task: sums of two numbers up to 100, with questions and scoring from reasoning-gym's `basic_arithmetic`.

    Calculate 12 + 35.

`import reasoning_gym` imports its hundred tasks, which takes four seconds and nine more packages, one of which must be
compiled. This task needs none of them, so it is imported past the two `__init__.py` that import them.

The demo's reward is an ordinary reward function: `target: streamrl.demos.sums:right`, run in a limited process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from streamrl.recipe.rewards import last_number

_PACKAGES = ("reasoning_gym", "reasoning_gym.arithmetic")
_MODULE = "reasoning_gym.arithmetic.basic_arithmetic"
_SETTINGS: Mapping[str, Any] = {
    **{"min_terms": 2, "max_terms": 2},  # with three, it gets one in twenty right even in the right format
    **{"min_digits": 1, "max_digits": 2},
    **{"operators": ["+"], "allow_parentheses": False},
}
# Item i is made from seed + i, so neighbouring seeds would give the same sums, shifted by one.
_BETWEEN_SEEDS = 1_000_003


def entries(seed: int) -> Iterator[dict[str, Any]]:
    """Yield `question`, `answer` and `metadata` of one sum after another; sums may repeat."""
    yield from _dataset(seed=seed * _BETWEEN_SEEDS, size=_BETWEEN_SEEDS)


def is_right(completion: str, entry: Mapping[str, Any]) -> bool:
    """Whether the last number in the completion gets full marks.

    reasoning-gym gives part of a mark to anything that contains the answer, such as 14 where 4 is right.
    """
    found = last_number(completion)
    return bool(found) and _dataset().score_answer(found, entry) == 1.0


@cache
def _dataset(**settings: int) -> Any:
    module = _basic_arithmetic()
    return module.BasicArithmeticDataset(module.BasicArithmeticDatasetConfig(**_SETTINGS, **settings))


@cache
def _basic_arithmetic() -> ModuleType:
    for name in _PACKAGES:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            assert spec is not None, "the demo has looked for it"
            assert spec.submodule_search_locations is not None, f"{name} is a package"
            package = ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations)
            sys.modules[name] = package
    return importlib.import_module(_MODULE)


def right(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """Reward 1 if reasoning-gym scores the answer as right, else 0. A prompt's fields are its entry there."""
    return float(is_right(completion, fields))
