"""The forms in which reward services are asked over HTTP, each one's request beside its answer.

    streamrl       POST /score       {"texts": [...]}                                   {"rewards": [...]}
    openrlhf       POST /get_reward  {"query": [...], "prompts": [...], "labels": [...]} {"rewards": [...]}
    vllm-classify  POST /classify    {"input": [...], "use_activation": false}          {"data": [{"index", "probs"}]}
    vllm-pooling   POST /pooling     {"input": [...], "use_activation": false}          {"data": [{"index", "data"}]}

A query is prompt and completion together. `labels` are the rows' field `answer`, null where a row has none. vLLM is
asked for the model's own number, before any sigmoid, since a reward is one. A model of token rewards answers a number a
token: the last one counts. What is no answer in the form is a ValueError; whether its numbers are finite is for the
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rewards.base import ScoreItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    path: str  # where requests go when the service's address names no path
    request: Callable[[Sequence[ScoreItem]], dict[str, Any]]
    rows: str  # the key under which an answer has its rows, one a sample
    indexed: bool = False  # each row says which it is
    number: Callable[[Any], Any] = lambda row: row  # what a row says; ValueError when it says none
    max_answer_bytes_per_row: int = 512

    def numbers(self, answer: Any, count: int) -> list[Any]:
        """What the answer holds for each of `count` rows, in their order; ValueError when it is none."""
        rows = answer.get(self.rows) if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != count:
            raise ValueError(f"no list of {count} {self.rows}")
        if self.indexed and [row.get("index") if isinstance(row, dict) else None for row in rows] != list(range(count)):
            raise ValueError(f"`{self.rows}` does not hold the rows 0 to {count - 1} in their order")
        return [self.number(row) for row in rows]


def _texts(items: Sequence[ScoreItem]) -> list[str]:
    return [item.prompt + item.completion for item in items]


def _ask_openrlhf(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {
        "query": _texts(items),
        "prompts": [item.prompt for item in items],
        "labels": [item.fields.get("answer") for item in items],
    }


def _ask_vllm(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {"input": _texts(items), "use_activation": False}


def _only(row: Any) -> Any:
    """x, or [x], as a tensor of [B, 1] prints."""
    if not isinstance(row, list):
        return row
    if len(row) != 1:
        raise ValueError(f"a row has {len(row)} numbers; a reward is one")
    return row[0]


def _last(values: Any) -> Any:
    """[x], or a list a token of [x] or of x: the last token's x."""
    if not isinstance(values, list) or not values:
        raise ValueError("a row has no numbers")
    return _only(values[-1])


FORMS: Mapping[str, Form] = {
    "streamrl": Form(
        path="/score",
        request=lambda items: {"texts": _texts(items)},
        rows="rewards",
        max_answer_bytes_per_row=64,
    ),
    # Beside the rewards an answer may tell scores and what to log.
    "openrlhf": Form(path="/get_reward", request=_ask_openrlhf, rows="rewards", number=_only),
    "vllm-classify": Form(
        path="/classify", request=_ask_vllm, rows="data", indexed=True, number=lambda row: _last(row.get("probs"))
    ),
    "vllm-pooling": Form(
        path="/pooling",
        request=_ask_vllm,
        rows="data",
        indexed=True,
        number=lambda row: _last(row.get("data")),
        max_answer_bytes_per_row=1 << 18,
    ),
}
