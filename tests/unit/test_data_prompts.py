from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from streamrl.data.dataset import Dataset
from streamrl.data.prompts import read_prompts
from streamrl.data.texts import read_texts
from streamrl.errors import DataError
from streamrl.protocol.wire.ticket import decode_ticket, encode_ticket
from streamrl.workers.rewards.base import ScoreItem
from tests.helpers import make_ticket


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def test_text_prompt_and_messages_are_read_with_their_fields(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        '{"text": "a", "answer": "1"}',
        '{"prompt": "b"}',
        json.dumps({"messages": messages, "level": {"x": [1, 2]}}),
    )
    file = read_prompts(path, malformed="error")
    assert [row.text for row in file.rows] == ["a", "b", None]
    assert file.rows[2].messages == tuple(messages)
    assert [dict(row.fields) for row in file.rows[:2]] == [{"answer": "1"}, {}]
    assert file.rows[2].fields == {"messages": messages, "level": {"x": [1, 2]}}
    assert [row.line for row in file.rows] == [1, 2, 3]
    assert file.num_skipped == 0


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"question": "a"}, {"prompt": "question", "fields": {"asked": "question"}}),
        ({"text": "a"}, {"fields": {"asked": "text"}}),
        ({"text": "a"}, {"prompt": "{text}", "fields": {"asked": "text"}}),
    ],
)
def test_the_prompts_column_may_be_a_field_too(tmp_path: Path, row: dict[str, str], settings: dict[str, Any]) -> None:
    path = write(tmp_path, json.dumps(row))

    [found] = read_prompts(Dataset(path=str(path), **settings), malformed="error").rows

    assert (found.text, found.fields) == ("a", {"asked": "a"})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("{problem} In JSON: {{answer}}", "2+3= In JSON: {answer}"),
        (r"{problem} \boxed{{{answer}}}", r"2+3= \boxed{5}"),
        ("{problem}}} and {{", "2+3=} and {"),
    ],
)
def test_braces_written_twice_in_a_template_are_braces(tmp_path: Path, prompt: str, text: str) -> None:
    path = write(tmp_path, json.dumps({"problem": "2+3=", "answer": "5"}))
    assert read_prompts(Dataset(path=str(path), prompt=prompt), malformed="error").rows[0].text == text


def test_braces_in_a_template_that_name_no_column_are_told_with_how_to_write_braces(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"problem": "2+3="}))
    with pytest.raises(DataError, match=r"no column 'answer'; it has: problem; .* are written \{\{ and \}\}"):
        read_prompts(Dataset(path=str(path), prompt="{problem} {answer}"), malformed="error")
    with pytest.raises(DataError, match=r"no column 'answer'; it has: problem$"):
        read_prompts(Dataset(path=str(path), prompt="answer"), malformed="error")


def test_a_column_of_messages_beside_a_text_prompt_makes_no_chat_of_it(tmp_path: Path) -> None:
    solved = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "It is 5"}]
    path = write(tmp_path, json.dumps({"problem": "2+3=", "answer": "5", "messages": solved}))

    [row] = read_prompts(Dataset(path=str(path), prompt="problem"), malformed="error").rows

    assert (row.text, row.fields) == ("2+3=", {"answer": "5"})
    tokens = np.zeros(1, dtype=np.int32)
    item = ScoreItem(prompt="2+3=", completion="5", token_ids=tokens, fields=row.fields, end="<end>")
    assert item.text == "2+3=5", "what a reward model reads: no chat, so no end of one"


def test_calls_are_read_in_the_form_of_chat_templates(tmp_path: Path) -> None:
    """APIs write the arguments as JSON, and no content where there are only calls."""
    function = {"name": "add", "arguments": '{"a": 2}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    asked, told = {"role": "user", "content": "2 + 3"}, {"role": "tool", "tool_call_id": "1", "content": "5"}
    [row] = read_prompts(write(tmp_path, json.dumps({"messages": [asked, call, told]})), malformed="error").rows
    assert row.messages is not None
    assert row.messages[1]["content"] == ""
    assert row.messages[1]["tool_calls"] == [{**call["tool_calls"][0], "function": {**function, "arguments": {"a": 2}}}]
    assert row.fields["messages"] == list(row.messages)
    assert row.plain == "2 + 3\n\n5"


@pytest.mark.parametrize(
    "arguments", ["add", '{"a": NaN}', '"\\ud83d"', {"a": 2}, None], ids=["text", "NaN", "half", "map", "null"]
)
def test_arguments_that_are_no_json_stay_as_they_are(tmp_path: Path, arguments: Any) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    lines = json.dumps({"messages": [call, {"role": "tool", "content": "5"}]})
    [row] = read_prompts(write(tmp_path, lines), malformed="error").rows
    assert row.messages is not None
    assert row.messages[0] == call


def test_the_tools_of_a_chat_go_on_with_it_and_may_be_json(tmp_path: Path) -> None:
    tool, chat = {"type": "function", "function": {"name": "add"}}, [{"role": "user", "content": "hi"}]
    rows = [{"messages": chat, "tools": tools} for tools in ([tool], json.dumps([tool]), ["add"], [])]
    path = write(tmp_path, *map(json.dumps, rows))
    fields = [row.fields["tools"] for row in read_prompts(path, malformed="error").rows]
    assert fields == [[tool], [tool], ["add"], []]
    chosen = Dataset(path=str(path), fields={"tools": "tools"})
    assert read_prompts(chosen, malformed="error").rows[0].fields["tools"] == [tool]
    without = Dataset(path=str(path), fields={"known": "tools"})
    assert "tools" not in read_prompts(without, malformed="error").rows[0].fields


def test_a_file_that_gzip_has_written_is_read_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    assert [(row.line, row.text) for row in read_prompts(path, malformed="error").rows] == [(1, "a"), (3, "b")]


@pytest.mark.parametrize("cut", [1, 12, 25])
def test_a_file_that_gzip_has_not_written_whole_is_one_clear_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-cut])
    with pytest.raises(DataError, match=r"data\.train: .*prompts\.jsonl\.gz cannot be read: "):
        read_prompts(path, malformed="error")


def test_a_character_in_two_escapes_is_whole(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, '{"text": "\\ud83d\\ude00"}'), malformed="error").rows[0].text == "\U0001f600"


def test_empty_lines_and_a_byte_order_mark_are_nothing(tmp_path: Path) -> None:
    file = read_prompts(write(tmp_path, b'\xef\xbb\xbf{"text": "a"}', "", "  ", '{"text": "b"}'), malformed="error")
    assert [(row.line, row.text) for row in file.rows] == [(1, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at character 2"),
        ("[1]", "expected an object"),
        ("{}", "found none"),
        ('{"text": "a", "prompt": "b"}', "found 'text' and 'prompt'"),
        ('{"text": 5}', "'text' must be non-empty text"),
        ('{"prompt": ""}', "'prompt' must be non-empty text"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', "'role' and 'content'"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        (
            '{"messages": [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]}',
            "'messages' ends with an assistant's message",
        ),
        ('{"text": "a", "score": NaN}', "NaN is not a JSON value"),
        ('{"text": "a", "score": 1e999}', "1e999 is too large for a number"),
        (b'{"text": "\xff"}', "not UTF-8; save the file in that encoding"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        ('{"text": "a \\ud83d"}', "\\ud83d is half of a surrogate pair"),
        ('{"text": "a", "answer": {"of": ["\\ude00"]}}', "\\ude00 is half of a surrogate pair"),
        ('{"text": "' + "x" * (1 << 20) + '"}', "bytes; at most"),
        # Written again it is longer than the line: 1000000000000000.0
        ('{"text": "a", "score": [' + "1e15," * 100_000 + "0]}", "a ticket carries 1048576"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_file_and_line(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, '{"text": "fine"}', line)
    with pytest.raises(DataError, match=r"train\.jsonl:2: ") as caught:
        read_prompts(path, malformed="error")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x.csv", "{hub: FOLDER, prompt: COLUMN} reads a folder of such files"),
        ("x.tsv", "{hub: FOLDER, prompt: COLUMN} reads a folder of such files"),
        ("x.xlsx", "save it as CSV in a folder, which {hub: FOLDER, prompt: COLUMN} reads"),
        ("folder", "is a folder"),
    ],
)
def test_what_is_no_file_of_json_lines_is_told_how_it_is_read(tmp_path: Path, name: str, told: str) -> None:
    for table in ("x.csv", "x.tsv", "x.xlsx"):
        (tmp_path / table).write_text("text,answer\na,b\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"data\.validation: ") as caught:
        read_prompts(tmp_path / name, malformed="error", key="data.validation")
    assert told in str(caught.value)


ROWS = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("malformed", ["error", "skip"])
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (json.dumps(ROWS, indent=2), "jq -c '.[]' FILE"),
        (json.dumps(ROWS), "jq -c '.[]' FILE"),
        ('[{"text": "a"},\n{"text": "b"}\n]', "jq -c '.[]' FILE"),  # whose last row alone is a line of its own
        (json.dumps(ROWS[0], indent=2), "jq -c . FILE"),
    ],
)
def test_a_file_of_json_that_is_no_lines_is_told_how_to_make_lines_of_it(
    tmp_path: Path, text: str, remedy: str, malformed: Literal["error", "skip"]
) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:1: a JSON .*; write one object per line: ") as caught:
        read_prompts(write(tmp_path, text), malformed=malformed)
    assert f"`{remedy}`" in str(caught.value)
    with pytest.raises(DataError, match=r"train\.jsonl:1: a JSON .*; write one object per line: "):
        list(read_texts(tmp_path / "train.jsonl", "prompt", "completion", what="demonstrations"))


def test_a_line_of_the_largest_size_fits_into_a_ticket_however_close_it_is_written(tmp_path: Path) -> None:
    line = '{"text":"a","tests":[' + "1," * 500_000 + "1]}"
    [row] = read_prompts(write(tmp_path, line), malformed="error").rows
    ticket = make_ticket(0, prompt="a", fields=row.fields)
    assert decode_ticket(encode_ticket(ticket)).fields == row.fields


def test_malformed_lines_are_skipped_and_counted_where_asked_for(tmp_path: Path) -> None:
    file = read_prompts(write(tmp_path, "{'", '{"text": "a"}', "5"), malformed="skip")
    assert [row.text for row in file.rows] == ["a"]
    assert file.num_skipped == 2


def test_a_missing_file_names_the_setting_and_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.validation: no such file: .*nowhere\.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl", malformed="error", key="data.validation")
    with pytest.raises(DataError, match=r"no such file: ~/x\.jsonl; ~ is taken literally: write the path out$"):
        read_prompts("~/x.jsonl", malformed="error")


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""), malformed="error")
    with pytest.raises(DataError, match="2 malformed lines were skipped"):
        read_prompts(write(tmp_path, "{'", "["), malformed="skip")
