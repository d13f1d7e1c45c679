"""The built-in reward functions, called as the pool calls them."""

from __future__ import annotations

import time

import pytest

from streamrl.recipe.rewards import exact_match, last_number, length_penalty, math_equal, numeric_match, regex_format


@pytest.mark.parametrize(
    ("completion", "answer", "score"), [(" 123\n", "123", 1.0), ("1 2 3", "123", 0.0), ("7", 7, 1.0), ("", "x", 0.0)]
)
def test_exact_match_compares_without_the_spaces_around(completion: str, answer: object, score: float) -> None:
    assert exact_match("", completion, [], {"answer": answer}) == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("So it is 42.", "42", 1.0),
        ("6 * 7 = 42", 42, 1.0),
        ("It costs $1,234.50", "1234.5", 1.0),
        ("10-5", "-5", 0.0),
        ("10-5", "5", 1.0),
        ("x = -5", "-5", 1.0),
        ("1e3", "#### 1000", 1.0),
        ("no number", "42", 0.0),
        ("42 or 43", "42", 0.0),
        ("9" * 400, "42", 0.0),
    ],
)
def test_numeric_match_compares_the_last_numbers(completion: str, answer: object, score: float) -> None:
    assert numeric_match("", completion, [], {"answer": answer}) == score


@pytest.mark.parametrize(
    ("completion", "last"),
    [
        ("The roots are 7,8,9", 9),
        ("(3,4)", 4),
        ("(-3,-4)", -4),
        ("7,8,100", 100),
        ("1,23", 23),
        ("1,2345", 2345),
        ("1,234,5678", 5678),
        ("1234,567", 567),
        ("0,500", 500),
        ("1,234,567", 1234567),
        ("1,234, 567", 567),
        ("$1,000.50", 1000.5),
        ("1{,}000", 1000),
        ("-12{,}345.5", -12345.5),
        ("10,\\!000", 10000),
        ("= .5", 0.5),
        ("-.5", -0.5),
        ("(.5,.25)", 0.25),
        ("so.5", 5),
        ("...5", 5),
        ("1..10", 10),
        ("It is 3.", 3),
        ("3.So 4", 4),
        ("1.5.2", 1.5),
        ("12.05.2024", 12.05),
        ("2024-05-12", 12),
        ("05/12/2024", 2024),
        ("x=-4", -4),
        ("x=\u22124", -4),
        ("10\u22124", 4),
        ("2,5e\u22123", 0.005),
        ("1.5E3", 1500),
        ("10:30", 30),
        ("²³", None),
        ("{,}.,-\u2212", None),
    ],
)
def test_the_last_number_is_what_a_reader_takes_for_it(completion: str, last: float | None) -> None:
    found = last_number(completion)
    assert (float(found) if found else None) == last


@pytest.mark.parametrize(
    "part",
    ["9", ",", "1,", "1,234", ",234", "1{,}234", "{,}", ".", ".5", "1.", "-", "1e", "1e-", "12,345.", "\u2212.", "a"],
)
def test_a_number_is_found_in_a_moment_in_whatever_text(part: str) -> None:
    began = time.process_time()
    last_number(part * (1_000_000 // len(part)) + "x")
    assert time.process_time() - began < 5.0  # one that tried every part for every other would take hours


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so it is \\boxed{0.5}", "1/2", 1.0),
        ("the answer is 1/2", r"$\frac{1}{2}$", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        (r"$2\sqrt2$", r"\sqrt{8}", 1.0),
        ("$x^2$", "x^2+1", 0.0),
        (r"first 3, then \boxed{4}", "3", 0.0),
        ("I do not know", "3", 0.0),
        (r"$\{2, 1\}$", r"$\{1, 2\}$", 1.0),
    ],
)
def test_math_equal_compares_what_they_mean(completion: str, answer: str, score: float) -> None:
    assert math_equal("", completion, [], {"answer": answer}) == score


@pytest.mark.parametrize(
    ("completion", "score"), [("so 3\n#### 42", 1.0), ("#### 1\n#### 42.", 1.0), ("42", 0.0), ("42 ####", 0.0)]
)
def test_numeric_match_may_look_only_behind_a_mark(completion: str, score: float) -> None:
    assert numeric_match("", completion, [], {"answer": "6*7=42\n#### 42"}, after="####") == score


def test_numeric_match_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(ValueError, match="field 'answer' holds no number"):
        numeric_match("", "42", [], {"answer": "forty-two"})


def test_a_missing_field_is_named_beside_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="no field 'solution'; it has: answer, source"):
        exact_match("", "42", [], {"answer": "42", "source": "book"}, field="solution")


def test_regex_format_wants_the_whole_completion() -> None:
    pattern = r"<think>.*</think>\s*\d+"
    assert regex_format("", "<think>so\nso</think> 42\n", [], {}, pattern=pattern) == 1.0
    assert regex_format("", "<think>so</think> 42 or so", [], {}, pattern=pattern) == 0.0


@pytest.mark.parametrize(("num_tokens", "score"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (500, -1.0)])
def test_length_penalty_falls_evenly_between_its_bounds(num_tokens: int, score: float) -> None:
    assert length_penalty("", "", [0] * num_tokens, {}, free_tokens=10, max_tokens=20) == score
