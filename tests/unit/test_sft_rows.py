"""What has a loss in a row of supervised training, and what is given before it, by tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from streamrl.data.settings import DATE
from streamrl.errors import DataError
from streamrl.learner.sft.rows import read_rows
from streamrl.learner.sft.training import Settings, train
from tests.session_world import ADD, chat_tokenizer, write_calling_model
from tests.session_world import TEMPLATE as SESSION_TEMPLATE
from tests.sft_world import write_rows
from tests.tiny_models import EOS, end_all_with, make_tokenizer, sentencepiece_like

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>;{% endif %}\
{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def trained_parts(
    path: Path, tokenizer: transformers.PreTrainedTokenizerFast | None = None, template: str = TEMPLATE, **settings: Any
) -> list[tuple[str, str]]:
    """(what is given before its first answer, what else has a loss and, in braces, what has none) of each piece"""
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.chat_template = template
    found = []
    rows = read_rows(path, tokenizer, [tokenizer.eos_token_id], max_tokens=1000, **{"date": DATE, **settings})
    for piece in rows.pieces:
        words = tokenizer.convert_ids_to_tokens(piece.token_ids.tolist())
        told = "".join(w if has else f"({w})" for w, has in zip(words, piece.mask.tolist(), strict=True))
        found.append((tokenizer.decode(piece.prompt_ids), told))
    return found


def test_the_answer_and_what_ends_it_have_a_loss_and_the_prompt_has_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"prompt": "2+2=", "completion": "4"})

    assert trained_parts(path) == [("2+2=", "4<eos>")]


def test_rows_of_several_batches_come_in_their_order_and_a_bad_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.learner.sft.rows._BATCH", 2)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"prompt": "1", "completion": "a"}, {"messages": said}, *({"prompt": p, "completion": "b"} for p in "234")]

    found = trained_parts(write_rows(tmp_path / "data.jsonl", *rows))

    assert [told[0] for _, told in found] == ["a", "y", "b", "b", "b"]
    assert [given for given, _ in found if len(given) == 1] == ["1", "2", "3", "4"]
    path = write_rows(tmp_path / "bad.jsonl", *rows, {"prompt": "", "completion": "b"})
    with pytest.raises(DataError, match=r"bad.jsonl:6: the prompt has no tokens"):
        trained_parts(path)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_has_no_space_that_a_tokenizer_puts_before_every_text(tmp_path: Path, chat: bool) -> None:
    """As those of sentencepiece do, Llama 2's and Mistral's: within a text there is none."""
    tokenizer = sentencepiece_like()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    path = write_rows(tmp_path / "data.jsonl", {"prompt": "2+2=", "completion": "4 5"})

    [piece] = read_rows(path, tokenizer, [1], max_tokens=200, date=DATE, chat=chat).pieces

    asked, said = (tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in (piece.prompt_ids, piece.token_ids))
    assert "".join(asked) == ("▁[2+2=]" if chat else "▁2+2=")
    assert "".join(said) == ("[4▁5]<eos>" if chat else "4▁5<eos>")


def test_of_a_dialogue_every_answer_has_a_loss_and_nothing_else_has(tmp_path: Path) -> None:
    said = [("user", "hi"), ("assistant", "yo"), ("user", "b"), ("assistant", "c")]
    path = write_rows(tmp_path / "data.jsonl", {"messages": [{"role": r, "content": c} for r, c in said]})

    [(given, told)] = trained_parts(path)

    assert given.endswith("hi<unk>a>")  # `<` is none of this tokenizer's characters
    assert told == "yo<eos>(;)(<unk>)(u)(>)(b)(<unk>)(a)(>)c<eos>"


def test_texts_may_be_a_chat(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"prompt": "2+2=", "completion": "4"})

    [(given, told)] = trained_parts(path, chat=True)

    assert (given, told) == ("<unk>u>2+2=<unk>a>", "4<eos>")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ WRITTEN }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGUN{% endif %}"
)


ASKED, AGAIN = {"role": "user", "content": "2+2="}, {"role": "user", "content": "3+3="}


THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}


def chatml(*, written: str, begun: str = "") -> str:
    return CHATML.replace("WRITTEN", written).replace("BEGUN", begun)


def test_where_a_template_writes_earlier_turns_anew_each_turn_is_trained_as_a_run_would_ask_it(tmp_path: Path) -> None:
    """As that of Qwen's models, which drops the thoughts of earlier turns."""
    said = "m.content if loop.last else m.content.split('</think>')[-1].lstrip()"
    rows = [{"messages": [ASKED, THOUGHT, AGAIN, THOUGHT]}, {"messages": [ASKED, THOUGHT]}]

    parts = trained_parts(write_rows(tmp_path / "data.jsonl", *rows), chat_tokenizer(), chatml(written=said))

    asked = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    again = f"{asked}4<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
    assert [given for given, _ in parts] == [asked, again, asked]
    assert {told.replace("Ċ", "\n") for _, told in parts} == {"<think>\nhm\n</think>\n\n4<|im_end|>"}


def test_an_end_token_that_the_template_does_not_write_ends_an_answer_and_stands_in_no_prompt(tmp_path: Path) -> None:
    """As of base models whose turns end with <|im_end|>, and whose texts end with another token."""
    answer = {"role": "assistant", "content": "4"}
    tokenizer = chat_tokenizer()
    end, turn = "<|endoftext|>", "<|im_end|>\n"
    tokenizer.add_special_tokens({"eos_token": end})
    path = write_rows(tmp_path / "data.jsonl", {"messages": [ASKED, answer, AGAIN, answer]})

    parts = trained_parts(path, tokenizer, chatml(written="m.content"))

    asked = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    again = f"{asked}4<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
    assert [given for given, _ in parts] == [asked, again]
    assert {told.replace("Ċ", "\n") for _, told in parts} == {f"4{turn}{end}"}


def test_the_turns_of_a_row_are_held_out_together(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = chatml(written="m.content if loop.last else '...'")  # each turn is a piece
    write_calling_model(tmp_path / "base", tokenizer)
    answer = {"role": "assistant", "content": "4"}
    data = write_rows(tmp_path / "data.jsonl", *[{"messages": [ASKED, answer, AGAIN, answer]}] * 3)

    outcome = train(
        Settings(model=str(tmp_path / "base"), data=data, output=tmp_path / "sft", held_out=0.2), lambda _: None
    )

    assert (outcome.num_rows, outcome.num_held_out) == (4, 2)


def test_an_answer_that_the_prompt_has_begun_is_its_own_text(tmp_path: Path) -> None:
    """As of DeepSeek-R1's distilled models: a prompt ends with <think>, and a given answer is written without."""
    template = chatml(written="m.content.split('</think>')[-1].lstrip()", begun="<think>\n")
    plain = {"role": "assistant", "content": "4"}
    rows = [{"messages": [ASKED, answer]} for answer in (THOUGHT, plain)]

    parts = trained_parts(write_rows(tmp_path / "data.jsonl", *rows), chat_tokenizer(), template)

    assert {given for given, _ in parts} == {"<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n<think>\n"}
    assert [told.replace("Ċ", "\n") for _, told in parts] == ["hm\n</think>\n\n4<|im_end|>", "4<|im_end|>"]
    called = {**plain, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(DataError, match=r"data.jsonl:1: the chat template writes this answer's prompt otherwise .*"):
        trained_parts(write_rows(tmp_path / "data.jsonl", {"messages": [ASKED, called]}), chat_tokenizer(), template)


def test_tools_and_calls_are_rendered_as_a_session_renders_them(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}  # as APIs write them
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    row = {"messages": [ASKED, called], "tools": [ADD]}

    [(given, told)] = trained_parts(write_rows(tmp_path / "data.jsonl", row), chat_tokenizer(), SESSION_TEMPLATE)

    assert given.startswith("<|im_start|>system\ntools: {")
    assert "adds two numbers" in given
    said = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><|im_end|>'
    assert told.replace("Ġ", " ") == said
    with pytest.raises(DataError, match=r"data.jsonl:1: .* does not render 'tools': describe them in a message"):
        trained_parts(tmp_path / "data.jsonl")
    with pytest.raises(DataError, match=r"data.jsonl:1: 'tools' must be a list of functions"):
        trained_parts(write_rows(tmp_path / "data.jsonl", row | {"tools": ["add"]}), chat_tokenizer(), SESSION_TEMPLATE)


def test_a_template_writes_the_date_of_the_settings_whatever_day_it_is(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"prompt": "2+2=", "completion": "4"})

    template = "{{ strftime_now('%Y') }}" + TEMPLATE
    parts = [trained_parts(path, template=template, chat=True, date=date) for date in (DATE, "1999-12-31")]

    assert [given[:4] for [(given, _)] in parts] == ["2026", "1999"]


def test_no_end_token_stands_between_a_prompt_and_its_answer(tmp_path: Path) -> None:
    """As of a tokenizer saved with `add_eos_token`."""
    tokenizer = make_tokenizer()
    end_all_with(tokenizer, EOS)

    parts = trained_parts(write_rows(tmp_path / "data.jsonl", {"prompt": "2+2=", "completion": "4"}), tokenizer)

    assert parts == [("2+2=", "4<eos>")]


def test_messages_that_lack_what_the_template_writes_are_named_with_their_line(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    written = "{{ m.tool_calls[0].function.arguments | tojson }}"
    tokenizer.chat_template = TEMPLATE + f"{{% for m in messages if m.tool_calls %}}{written}{{% endfor %}}"
    called = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "now"}}]}
    path = write_rows(tmp_path / "data.jsonl", {"messages": [{"role": "user", "content": "a"}, called]})

    with pytest.raises(DataError, match=r"data.jsonl:1: the tokenizer's chat template refuses .*Undefined"):
        read_rows(path, tokenizer, [1], max_tokens=200, date=DATE)
