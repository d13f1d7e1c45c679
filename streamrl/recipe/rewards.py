"""Built-in rewards, named by `target`, allowed on every worker.

Each has the form of a reward function (see `workers.rewards.functions`); parameters after the `*` are set by `options`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.recipe import reasoning

# Takes time proportional to the text's length, since no alternative is long when it fails.
_NUMBER = re.compile(
    r"""
    (?: (?<!\d) [-\u2212] )?    # after a digit it is a subtraction, not a sign
    (?:
        (?<!\d) (?<!\d\.)    # the 2 of 1.5.2 begins no number
        (?: (?<!\d,) (?!0) \d{1,3} (?: (?: , (?:\\!)? | \{,\} ) \d{3} )+ (?!\d)    # 1,234; in LaTeX 1{,}234
          | \d+    # any other comma lies between numbers
        ) (?: \.\d+ )?
      | (?<![\w.)\]]) \.\d+    # .5, but not in `so.5` or `...5`
    )
    (?: [eE] [-+\u2212]? \d+ )?
    """,
    re.VERBOSE,
)
_PLAIN = str.maketrans({"\u2212": "-", **dict.fromkeys(",{}\\!")})


def exact_match(
    prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """1 if the completion equals the answer, apart from surrounding spaces; else 0."""
    return float(completion.strip() == str(_field(fields, field)).strip())


def numeric_match(
    prompt: str,
    completion: str,
    token_ids: Sequence[int],
    fields: Mapping[str, Any],
    *,
    field: str = "answer",
    tolerance: float = 1e-6,
    after: str = "",
) -> float:
    """1 if the completion's last number equals the answer's last number; else 0.

    A comma separates numbers, except in front of three digits as in 1,234,567.
    With `after`, such as GSM8K's ####, only the text after its last occurrence counts; without an occurrence, 0."""
    right = last_number(str(_field(fields, field)))
    if not right:
        raise ValueError(f"field {field!r} holds no number: {_field(fields, field)!r:.80}")
    answer = completion
    if after:
        answer = completion.rpartition(after)[2] if after in completion else ""
    given = last_number(answer)
    is_close = given and math.isclose(float(given), float(right), rel_tol=tolerance, abs_tol=tolerance)
    return float(bool(is_close))


def math_equal(
    prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """1 if the completion's final answer, LaTeX or plain, is mathematically equal to the answer; else 0."""
    try:
        import math_verify  # lazy: imports sympy, which takes a second
    except ImportError:
        raise ValueError("math_equal needs math-verify: `pip install math-verify`") from None
    right = str(_field(fields, field))
    # Also parse it as a formula: answers often lack their dollar signs.
    gold = math_verify.parse(right) or math_verify.parse(f"${right}$")
    if not gold:
        raise ValueError(f"field {field!r} holds nothing mathematical: {right!r:.80}")
    return float(math_verify.verify(gold, math_verify.parse(completion)))


def regex_format(
    prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any], *, pattern: str
) -> float:
    """1 if the whole completion, apart from surrounding spaces, matches the pattern; else 0."""
    return float(re.fullmatch(pattern, completion.strip(), flags=re.DOTALL) is not None)


def length_penalty(
    prompt: str,
    completion: str,
    token_ids: Sequence[int],
    fields: Mapping[str, Any],
    *,
    free_tokens: int,
    max_tokens: int,
) -> float:
    """0 up to `free_tokens`, then decreasing linearly to -1 at `max_tokens` and beyond."""
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"free_tokens ({free_tokens}) must be below max_tokens ({max_tokens})")
    over = max(0, len(token_ids) - free_tokens)
    return max(-1.0, -over / (max_tokens - free_tokens))


REWARDS: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "math_equal": math_equal,
    "regex_format": regex_format,
    "length_penalty": length_penalty,
    "reasoning_gym": reasoning.score_answer,
}
LOADS: Mapping[str, Callable[[], None]] = {"reasoning_gym": reasoning.load}  # run before the first sample


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"the prompt's row has no field {name!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    return fields[name]


def last_number(text: str) -> str:
    """Return the text's last number in a form that `float` reads; empty if it has none."""
    found = _NUMBER.findall(text)
    return found[-1].translate(_PLAIN) if found else ""
