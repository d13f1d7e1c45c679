"""The task: sums of two numbers up to 100. Questions and judgement are those of reasoning-gym's `basic_arithmetic`.

    Calculate 12 + 35.

`import reasoning_gym` imports its hundred tasks, which takes four seconds and nine packages more, one of which must be
compiled. This one task needs none of them and is imported past the two `__init__.py` that do so.

The demo's reward function, as anybody's: `target: streamrl.demos.sums:right`, run in a limited process.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

_PACKAGES = ("reasoning_gym", "reasoning_gym.arithmetic")
_MODULE = "reasoning_gym.arithmetic.basic_arithmetic"
_SETTINGS: Mapping[str, Any] = {
    **{"min_terms": 2, "max_terms": 2},  # of three, this model gets one in twenty right even in the right form
    **{"min_digits": 1, "max_digits": 2},
    **{"operators": ["+"], "allow_parentheses": False},
}
# Item i is made from seed + i: seeds side by side would give the same sums, moved by one.
_BETWEEN_SEEDS = 1_000_003
_NUMBER = re.compile(r"(?<![\d.,])-?\d+(?:,\d{3})*(?:\.\d+)?")  # a minus after a digit is a subtraction and no sign


def entries(seed: int) -> Iterator[dict[str, Any]]:
    """`question`, `answer` and `metadata` of one sum after the other; the same sum may come again."""
    yield from _dataset(seed=seed * _BETWEEN_SEEDS, size=_BETWEEN_SEEDS)


def is_right(completion: str, entry: Mapping[str, Any]) -> bool:
    """Whether the last number of the completion gets full marks. A part of one it gives to whatever contains the
    answer, such as 14 where 4 is right."""
    found = _NUMBER.findall(completion)
    return bool(found) and _dataset().score_answer(found[-1], entry) == 1.0


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
    """1 when the answer is right, by reasoning-gym; else 0. The fields of a prompt are its entry there."""
    return float(is_right(completion, fields))
