"""The forms in which reward services are asked: what they are sent, and what of their answers is taken for scores."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.workers.rewards.forms import FORMS
from tests.tiny_rewards import make_item

ITEMS = [make_item("4", prompt="2+2=", answer="4"), make_item("5", prompt="2+2=")]


@pytest.mark.parametrize(
    ("form", "request_"),
    [
        ("streamrl", {"texts": ["2+2=4", "2+2=5"]}),
        ("openrlhf", {"query": ["2+2=4", "2+2=5"], "prompts": ["2+2=", "2+2="], "labels": ["4", None]}),
        ("vllm-classify", {"input": ["2+2=4", "2+2=5"], "use_activation": False}),
        ("vllm-pooling", {"input": ["2+2=4", "2+2=5"], "use_activation": False}),
    ],
)
def test_every_form_sends_prompt_and_completion_together(form: str, request_: dict[str, Any]) -> None:
    assert FORMS[form].request(ITEMS) == request_


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("streamrl", {"rewards": [0.5, -1]}),
        ("openrlhf", {"rewards": [0.5, -1], "scores": [0, 0], "extra_logs": {"a": [1, 2]}}),
        ("openrlhf", {"rewards": [[0.5], [-1]]}),
        ("vllm-classify", {"data": [{"index": 0, "label": "L", "probs": [0.5]}, {"index": 1, "probs": [-1]}]}),
        ("vllm-pooling", {"data": [{"index": 0, "data": [0.5]}, {"index": 1, "data": [-1]}]}),
        ("vllm-pooling", {"data": [{"index": 0, "data": [[9], [0.5]]}, {"index": 1, "data": [[3], [-1]]}]}),
    ],
)
def test_every_form_finds_a_number_a_row(form: str, answer: dict[str, Any]) -> None:
    assert FORMS[form].numbers(answer, 2) == [0.5, -1]


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("streamrl", [0.5, 1.0]),
        ("streamrl", {"rewards": [0.5]}),
        ("openrlhf", {"scores": [0.5, 1.0]}),
        ("openrlhf", {"rewards": [[0.5, 1.0], [1.0, 2.0]]}),
        ("vllm-classify", {"data": [{"index": 1, "probs": [0.5]}, {"index": 0, "probs": [1.0]}]}),
        ("vllm-classify", {"data": [{"index": 0, "probs": []}, {"index": 1, "probs": [1.0]}]}),
        ("vllm-classify", {"data": [[0.5], [1.0]]}),
        ("vllm-pooling", {"data": [{"index": 0, "data": "AAAA"}, {"index": 1, "data": "AAAA"}]}),
        ("vllm-pooling", {"data": [{"index": 0, "data": [[1, 2]]}, {"index": 1, "data": [[1, 2]]}]}),
    ],
)
def test_what_is_no_answer_in_the_form_is_an_error(form: str, answer: Any) -> None:
    with pytest.raises(ValueError):
        FORMS[form].numbers(answer, 2)
