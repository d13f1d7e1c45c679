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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.rewards.base import ScoreItem


class Form(Protocol):
    @property
    def path(self) -> str:
        """Where requests go when the service's address names no path."""
        ...

    @property
    def max_answer_bytes_per_row(self) -> int: ...

    def request(self, items: Sequence[ScoreItem]) -> dict[str, Any]: ...

    def numbers(self, answer: Any, count: int) -> list[Any]:
        """What the answer holds for each of `count` rows, in their order; ValueError when it is none."""
        ...


@dataclass(frozen=True, slots=True)
class _Streamrl:
    path: str = "/score"
    max_answer_bytes_per_row: int = 64

    def request(self, items: Sequence[ScoreItem]) -> dict[str, Any]:
        return {"texts": _texts(items)}

    def numbers(self, answer: Any, count: int) -> list[Any]:
        return _list(answer, "rewards", count)


@dataclass(frozen=True, slots=True)
class _OpenRlhf:
    path: str = "/get_reward"
    max_answer_bytes_per_row: int = 512  # beside the rewards it may tell scores and what to log

    def request(self, items: Sequence[ScoreItem]) -> dict[str, Any]:
        return {
            "query": _texts(items),
            "prompts": [item.prompt for item in items],
            "labels": [item.fields.get("answer") for item in items],
        }

    def numbers(self, answer: Any, count: int) -> list[Any]:
        # Some servers answer a row as a list of one number, as a tensor of [B, 1] prints.
        return [_only(one) if isinstance(one, list) else one for one in _list(answer, "rewards", count)]


@dataclass(frozen=True, slots=True)
class _Vllm:
    path: str
    field: str  # of a row's answer, where its numbers are
    max_answer_bytes_per_row: int

    def request(self, items: Sequence[ScoreItem]) -> dict[str, Any]:
        return {"input": _texts(items), "use_activation": False}

    def numbers(self, answer: Any, count: int) -> list[Any]:
        rows = _list(answer, "data", count)
        if not all(isinstance(row, dict) for row in rows) or [row.get("index") for row in rows] != list(range(count)):
            raise ValueError(f"`data` does not hold the rows 0 to {count - 1} in their order")
        return [_last(row.get(self.field)) for row in rows]


FORMS: Mapping[str, Form] = {
    "streamrl": _Streamrl(),
    "openrlhf": _OpenRlhf(),
    "vllm-classify": _Vllm(path="/classify", field="probs", max_answer_bytes_per_row=512),
    "vllm-pooling": _Vllm(path="/pooling", field="data", max_answer_bytes_per_row=1 << 18),
}


def _texts(items: Sequence[ScoreItem]) -> list[str]:
    return [item.prompt + item.completion for item in items]


def _list(answer: Any, key: str, count: int) -> list[Any]:
    values = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"no list of {count} {key}")
    return values


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"a row has {len(values)} numbers; a reward is one")
    return values[0]


def _last(values: Any) -> Any:
    """[x], or a list a token of [x] or of x: the last token's x."""
    if not isinstance(values, list) or not values:
        raise ValueError("a row has no numbers")
    return _only(values[-1]) if isinstance(values[-1], list) else values[-1]
