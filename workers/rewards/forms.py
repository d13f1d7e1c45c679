"""The forms in which reward services are asked, each beside its answer.

    streamrl       POST /score       {"texts": [...]}                                   {"rewards": [...]}
    openrlhf       POST /get_reward  {"query": [...], "prompts": [...], "labels": [...]} {"rewards": [...]}
    vllm-classify  POST /classify    {"input": [...], "use_activation": false}          {"data": [{"index", "probs"}]}
    vllm-pooling   POST /pooling     {"input": [...], "use_activation": false}          {"data": [{"index", "data"}]}

A query is prompt and completion concatenated; a chat is written to its end (`ModelFacts.ends`), and vLLM is told not to
add special tokens to it. `labels` are the rows' field `answer`, null if a row has none. vLLM is asked for the model's
raw output, before any sigmoid, which is what a reward is. From a model of token rewards, with one number per token, the
last one counts. A malformed answer is a ValueError; whether its numbers are finite is checked by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.workers.rewards.base import ScoreItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    path: str  # appended if the service's address has no path
    request: Callable[[Sequence[ScoreItem]], dict[str, Any]]
    rows: str  # the answer's key that holds one row per sample
    indexed: bool = False  # each row carries its index
    number: Callable[[Any], Any] = lambda row: row  # extracts a row's number; ValueError if it has none
    max_answer_bytes_per_row: int = 512
    max_answer_bytes_per_byte: int = 0  # of a row's text, in addition

    def max_answer_bytes(self, item: ScoreItem) -> int:
        num_bytes = len(item.text.encode(errors="replace"))
        return self.max_answer_bytes_per_row + self.max_answer_bytes_per_byte * num_bytes

    def numbers(self, answer: Any, count: int) -> list[Any]:
        """Extract `count` numbers from the answer, in order. ValueError if it is malformed."""
        rows = answer.get(self.rows) if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != count:
            raise ValueError(f"no list of {count} {self.rows}")
        if self.indexed and [row.get("index") if isinstance(row, dict) else None for row in rows] != list(range(count)):
            raise ValueError(f"`{self.rows}` without the rows 0 to {count - 1} in order")
        return [self.number(row) for row in rows]


def _ask_openrlhf(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {
        "query": [item.text for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [item.fields.get("answer") for item in items],
    }


def _ask_vllm(items: Sequence[ScoreItem]) -> dict[str, Any]:
    request: dict[str, Any] = {"input": [item.text for item in items], "use_activation": False}
    if items[0].is_chat:  # as all of them are: requests are of one kind
        request["add_special_tokens"] = False
    return request


def _only(row: Any) -> Any:
    """Return x from x or [x], as a [B, 1] tensor serialises."""
    if not isinstance(row, list):
        return row
    if len(row) != 1:
        raise ValueError(f"a row has {len(row)} numbers instead of one")
    return row[0]


def _last(values: Any) -> Any:
    """Return the last token's x, from [x] or a list per token of [x] or x."""
    if not isinstance(values, list) or not values:
        raise ValueError("a row has no numbers")
    return _only(values[-1])


FORMS: Mapping[str, Form] = {
    "streamrl": Form(
        path="/score",
        request=lambda items: {"texts": [item.text for item in items]},
        rows="rewards",
        max_answer_bytes_per_row=64,
    ),
    # The answer may also contain scores and values to log.
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
        max_answer_bytes_per_byte=32,  # `[x],` for each token, of which a text has at most one per byte
    ),
    # Asked test by test, by `sandbox_fusion`.
    "sandbox-fusion": Form(path="/run_code", request=lambda items: {}, rows=""),
}
