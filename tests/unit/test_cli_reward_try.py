"""`streamrl reward try`: a function on some rows, run as workers run it, and its own line where it fails."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.ops.cli.main import main
from streamrl.ops.cli.rewards.options import as_option
from tests.tiny_models import make_model

CODE = """
import json

def near(prompt, completion, token_ids, fields, *, scale=10.0):
    return 1.0 - abs(float(completion) - float(fields["answer"])) / scale

def of_trl(completions, answer, messages=None, **kwargs):
    return [None if answer[0] == "7" else float(len(kwargs["completion_ids"][0]))]

def within(prompt, completion, token_ids, fields):
    return json.loads(completion)["score"]

def greedy(prompt, completion, token_ids, fields):
    print("it eats")
    return float(len(bytearray(1 << 30)))

def endless(prompt, completion, token_ids, fields):
    while True: pass

def of_all(completions, rewards, **kwargs):
    assert len(completions) == 2
    return [of["right"] + of["judged"] for of in rewards]

def a_token(prompt, completion, token_ids, fields):
    return [0.5 for _ in token_ids]

def echoes(prompt, completion, token_ids, fields):
    raise ValueError(prompt)
"""
ROWS = [
    {"text": "2+2=", "answer": "4"},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}], "answer": "7"},
    {"text": "5+5=", "answer": "10"},
]


@pytest.fixture(autouse=True)
def working_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def tried(
    capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0, data: str = "rows.jsonl"
) -> list[dict[str, Any]]:
    assert main(["reward", "try", *words, "--data", data, "--json"]) == expect, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    assert told["num_failed"] == sum(row["error"] is not None for row in told["rows"])
    rows: list[dict[str, Any]] = told["rows"]
    return rows


def test_a_configuration_tells_which_rows_and_which_of_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Path("asked.jsonl").write_text('{"question": "2+2=", "solution": "4"}\n')
    Path("run.yaml").write_text(
        "model: {path: a/b}\nrewards: {r: {type: function, target: numeric_match}}\n"
        "data: {train: {path: asked.jsonl, prompt: question, fields: {answer: solution}}}\n"
    )

    (row,) = tried(capsys, "mine.py:near", "--field", "answer", data="run.yaml")

    assert (row["prompt"], row["completion"], row["score"]) == ("2+2=", "4", 1.0)


def test_a_function_that_scores_each_token_has_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tried(capsys, "mine.py:a_token", "--per-token", "--completion", "four")
    assert [(row["score"], row["error"]) for row in rows] == [(2.0, None)] * 3
    (row,) = tried(capsys, "mine.py:a_token", "--completion", "four", "--num", "1", expect=1)
    assert "not a number" in row["error"]


@pytest.mark.parametrize("target", ["sandbox", "r"])
def test_what_has_its_settings_elsewhere_refuses_per_token(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "model: {path: a/b}\nrewards: {r: {type: function, target: numeric_match}}\ndata: {train: rows.jsonl}\n"
    )
    assert main(["reward", "try", target, "--data", "run.yaml", "--completion", "4", "--per-token"]) == 2
    assert "--per-token: " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["[1]", "a: b", ""])
def test_an_option_that_yaml_reads_as_no_value_is_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mine.py:near", "--data", "rows.jsonl", "--field", "answer", "--option", f"mark={value}"]
    assert main(["reward", "try", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--option 'mark={value}'" in line
    assert """'mark="7"'""" in line


def test_an_option_is_not_cut_at_what_yaml_takes_for_a_comment() -> None:
    assert [as_option(f"mark={text}") for text in ("####", "a #1", "'7'", "7")] == [
        ("mark", "####"),
        ("mark", "a #1"),
        ("mark", "7"),
        ("mark", 7),
    ]


def test_completions_are_a_field_one_text_or_a_file_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["score"] for row in tried(capsys, "mine.py:near", "--field", "answer")] == [1.0, 1.0, 1.0]
    scaled = tried(capsys, "mine.py:near", "--completion", "6", "--option", "scale=4", "--num", "2")
    assert [row["score"] for row in scaled] == [0.5, 0.75]
    Path("said.jsonl").write_text('"4"\n{"completion": "17", "of": "whom"}\n')
    said = tried(capsys, "mine.py:near", "--completions", "said.jsonl")
    assert [(row["line"], row["completion"], row["score"]) for row in said] == [(1, "4", 1.0), (2, "17", 0.0)]
    assert [row["prompt"] for row in said] == ["2+2=", "Add.\n3+4="]
    assert all(0 < row["seconds"] < 10 for row in said)


def test_completions_are_lines_like_those_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("said.jsonl").write_bytes(b'\xef\xbb\xbf"4"\n\n  \n"17"\n')
    Path("said.jsonl.gz").write_bytes(gzip.compress(b'"4"\n"17"\n'))
    for name in ("said.jsonl", "said.jsonl.gz"):
        said = tried(capsys, "mine.py:near", "--completions", name)
        assert [(row["line"], row["completion"]) for row in said] == [(1, "4"), (2, "17")]
    Path("said.jsonl").write_text('"4"\n\n"\\ud800"\n')
    assert main(["reward", "try", "mine.py:near", "--data", "rows.jsonl", "--completions", "said.jsonl"]) == 2
    assert "said.jsonl:3 must be a JSON string" in (told := capsys.readouterr().err)
    assert "\\ud800 is half of a surrogate pair" in told


def test_a_completion_may_have_any_line_separator(capsys: pytest.CaptureFixture[str]) -> None:
    text = "one\u2028two\u2029three\x85four"
    Path("said.jsonl").write_text(f'"{text}"\n["4", "{text}"]\n', encoding="utf-8")
    said = tried(capsys, "exact_match", "--completions", "said.jsonl")
    assert [row["completion"] for row in said] == [text, "4", text]


def test_a_function_of_trls_form_may_say_that_it_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tried(capsys, "mine.py:of_trl", "--completion", "four")
    assert [(row["score"], row["error"]) for row in rows] == [(4.0, None), (None, None), (4.0, None)]
    assert main(["reward", "try", "mine.py:of_trl", "--data", "rows.jsonl", "--completion", "four"]) == 0
    shown = capsys.readouterr().out
    assert "score       the function returned None: it does not apply\n" in shown
    assert shown.endswith("3 rows: 2 with a score, 4 on average; 0 failed\n")


def test_a_group_function_of_a_run_reads_the_scores_of_its_other_sources(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "model: {path: a/b}\ndata: {train: rows.jsonl}\nrewards:\n"
        "  right: {type: function, target: numeric_match}\n"
        "  judged: {type: http, url: 'http://127.0.0.1:9'}\n"
        "  of_all: {type: function, target: mine.py:of_all, of_group: true}\n"
    )
    Path("said.jsonl").write_text('["4", "5"]\n')
    assert main(["reward", "try", "of_all", "--data", "run.yaml", "--completions", "said.jsonl", "--json"]) == 0
    shown = capsys.readouterr()
    assert [row["score"] for row in json.loads(shown.out)["rows"]] == [2.0, 1.0]
    assert shown.err == "judged is not asked: of_all reads 1 as its reward\n"


def test_a_built_in_is_tried_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["score"] for row in tried(capsys, "exact_match", "--completion", "7")] == [0.0, 1.0, 0.0]


def test_an_error_names_the_users_own_line_and_not_the_librarys(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = tried(capsys, "mine.py:within", "--completion", "{", "--num", "1", expect=1)
    assert row["error"].startswith("the function failed: JSONDecodeError: ")
    assert row["error"].endswith('(mine.py:11: return json.loads(completion)["score"])')
    (row,) = tried(capsys, "numeric_match", "--field", "answer", "--option", "field=level", "--num", "1", expect=1)
    assert row["error"] == "the function failed: ValueError: the prompt's row has no field 'level'; it has: answer"


def test_the_limits_are_those_of_a_worker(capfd: pytest.CaptureFixture[str]) -> None:
    (row,) = tried(capfd, "mine.py:endless", "--completion", "", "--num", "1", "--timeout-s", "0.3", expect=1)
    assert row["error"] == "the function failed: no answer within 0.3 s"
    words = ["reward", "try", "mine.py:greedy", "--data", "rows.jsonl", "--completion", "", "--num", "1"]
    assert main([*words, "--memory-mb", "256"]) == 1
    shown = capfd.readouterr()
    assert "MemoryError" in shown.out
    assert shown.err == "it eats\n"


def test_what_a_row_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"text": "\x1b[2J"}) + "\n")
    assert main(["reward", "try", "mine.py:echoes", "--data", "rows.jsonl", "--completion", "\x1b[2J"]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_model_lends_its_template_and_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Path("model"), hidden=32)
    words = ["--model", "model", "--completion", "aab"]
    (row,) = tried(capsys, "mine.py:of_trl", *words, "--num", "1")
    assert row["score"] == 3.0  # a character is a token
    assert main(["reward", "try", "mine.py:of_trl", *words, "--data", "rows.jsonl"]) == 2
    assert "--model model: its tokenizer has no chat template, and line 2 is a chat" in capsys.readouterr().err
    (Path("model") / "chat_template.jinja").write_text("{{ messages[0].missing | tojson }}")
    assert main(["reward", "try", "mine.py:of_trl", *words, "--data", "rows.jsonl"]) == 2
    assert "--model model: the chat template rejects line 2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine.py:near"], "exactly one of --completion, --completions and --field is needed"),
        (["mine.py:near", "--field", "a", "--completion", "b"], "exactly one of --completion"),
        (["mine.py:near", "--field", "right"], "--field: rows.jsonl:1 has no field 'right'; it has: answer"),
        (["mine.py:near", "--completions", "none.jsonl"], "--completions: none.jsonl cannot be read"),
        (["mine.py:near", "--completions", "mine.py"], "--completions: mine.py:2 must be a JSON string, or"),
        (["mine.py:near", "--completion", "", "--option", "scale"], "write NAME=VALUE, such as scale=5"),
        (["mine.py:near", "--completion", "", "--option", "speed=1"], "unexpected keyword argument 'speed'"),
        (["mine.py:far", "--completion", ""], "cannot use it: AttributeError: mine.py has no 'far'"),
        (["no.py:far", "--completion", ""], "cannot use it: FileNotFoundError: no such file: no.py"),
        (["exact", "--completion", ""], "FILE:FUNCTION: 'exact' is neither built in (exact_match, "),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "try", *words, "--data", "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_of_a_sandbox_it_shows_what_became_of_each_test(capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["assert add(1, 1) == 2", "assert add(1, 1) == 3, 'not three'"]
    problem = {"text": "Write add.", "tests": tests, "one": "def add(a, b): return a + b"}
    Path("problems.jsonl").write_text(json.dumps(problem) + "\n")

    [row] = tried(capsys, "sandbox", "--field", "one", data="problems.jsonl")
    assert main(["reward", "try", "sandbox", "--field", "one", "--data", "problems.jsonl"]) == 0
    told = capsys.readouterr().out

    assert [one["passed"] for one in row["tests"]] == [True, False]
    assert (row["score"], row["error"]) == (0.0, None)
    assert re.search(r"score +0\ntest 1 +passed\ntest 2 +AssertionError: not three", told)


def test_an_option_that_no_sandbox_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sandbox", "--data", "rows.jsonl", "--completion", "1", "--option", "time=2"]
    assert main(["reward", "try", *words]) == 2
    said = capsys.readouterr().err
    assert "--option: time:" in said
    assert "its options are field, partial, time_s, memory_mb" in said


def test_a_service_that_is_out_is_waited_for_once_and_for_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Not for its `outage_s`, ten minutes, at each row."""
    model = {"path": "./none"}
    judged = {"type": "http", "url": "http://127.0.0.1:9/score"}
    config = {"model": model, "data": {"train": "rows.jsonl"}, "rewards": {"judged": judged}}
    Path("run.yaml").write_text(json.dumps(config))

    status = main(["reward", "try", "judged", "--data", "run.yaml", "--completion", "7", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert (status, told["num_failed"]) == (1, 3)
    assert [row["seconds"] > 9 for row in told["rows"]] == [True, False, False]
    asked, *others = [row["error"] for row in told["rows"]]
    assert asked.startswith("no replica answered for 10 s: ")
    assert {error.partition(",")[0] for error in others} == {"not asked"}
