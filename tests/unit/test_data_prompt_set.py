from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template, TemplateError
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.groups.prompts import PromptSet, Tokenizer, num_shared, read_held_out
from tests.session_world import ADD, chat_tokenizer
from tests.tiny_models import EOS, end_all_with, make_tokenizer


class CharTokenizer:
    """One token a character, and a 1 in front unless special tokens are off; a chat template that wants a user."""

    def __init__(self, *, chat_template: str | None = "there is one") -> None:
        self.chat_template = chat_template

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        start = [1] if add_special_tokens else []
        return {"input_ids": [start + [ord(c) for c in t.strip()] for t in text]}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[Any], *, add_generation_prompt: bool, **how: Any) -> str:
        assert not how["tokenize"]
        if conversation[0]["role"] != "user":
            raise TemplateError("a user must begin")
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>" * add_generation_prompt


def told(logs: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """(malformed, overlong, truncated) of each file, as the log has them."""
    counts = ("malformed", "overlong", "truncated")
    return [tuple(entry[name] for name in counts) for entry in logs if entry["event"] == "prompts skipped or truncated"]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines))
    return path


def load(path: Path, *, seed: int = 1, tokenizer: Tokenizer | None = None, **settings: Any) -> PromptSet:
    data = schema.Data(train=str(path), **settings)
    return PromptSet.load(tokenizer=tokenizer or CharTokenizer(), data=data, seed=seed)


def held_out(train: Path, *sets: Path, max_prompts: int) -> tuple[list[str], list[str]]:
    """(the texts of held-out prompts, what was told)"""
    notices: list[str] = []
    validation = {f"set{number}": {"path": str(path)} for number, path in enumerate(sets)}
    config = schema.Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": str(train), "validation": validation},
            "validation": {"max_prompts": max_prompts},
        }
    )
    rows = read_held_out(config, CharTokenizer(), notice=notices.append)
    return [row.text for row in rows], notices


def numbered(folder: Path, count: int) -> Path:
    return write(folder, *(f'{{"text": "p{i}", "answer": {i}}}' for i in range(count)))


def test_texts_get_special_tokens_and_chats_get_those_of_their_template(tmp_path: Path) -> None:
    prompts = load(
        write(
            tmp_path,
            '{"messages": [{"role": "user", "content": "x"}]}',
            '{"text": "ab", "answer": "c"}',
            '{"messages": [{"role": "user", "content": "y"}]}',
        )
    )
    assert [row.text for row in prompts.rows] == ["<user>x<assistant>", "ab", "<user>y<assistant>"]
    assert prompts.rows[0].token_ids.tolist() == [ord(c) for c in "<user>x<assistant>"]
    assert prompts.rows[1].token_ids.tolist() == [1, ord("a"), ord("b")]
    assert prompts.rows[1].fields == {"answer": "c"}
    assert str(prompts.rows[1].token_ids.dtype) == "int32"


def test_an_overlong_prompt_is_an_error_with_file_and_line_and_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a"}', '{"text": "abcdef"}')
    with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has 7 tokens, data\.max_prompt_tokens is 4"):
        load(path, max_prompt_tokens=4)


def test_overlong_prompts_are_skipped_and_counted_where_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a"}', '{"text": "abcdef"}', "{")
    with capture_logs() as logs:
        prompts = load(path, max_prompt_tokens=4, overlong="skip", malformed="skip")
    assert [row.text for row in prompts.rows] == ["a"]
    assert told(logs) == [(1, 1, 0)]


def test_overlong_prompts_keep_their_end_where_asked_for_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a"}', '{"text": "abcdef"}')
    with capture_logs() as logs:
        prompts = load(path, max_prompt_tokens=4, overlong="truncate")
    whole = load(write(tmp_path, '{"text": "abcdef"}'), max_prompt_tokens=99)
    assert prompts.rows[1].token_ids.tolist() == whole.rows[0].token_ids.tolist()[-4:]
    assert prompts.rows[1].text == "cdef"
    assert told(logs) == [(0, 0, 1)]


def test_a_set_without_usable_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.train: no prompt .* 1 longer than data\.max_prompt_tokens=2"):
        load(write(tmp_path, '{"text": "abcdef"}'), max_prompt_tokens=2, overlong="skip")


def test_messages_without_a_chat_template_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(DataError, match=r"train\.jsonl:1: 'messages' need a chat template"):
        load(path, tokenizer=CharTokenizer(chat_template=None))


def test_messages_that_the_template_refuses_are_malformed(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a"}', '{"messages": [{"role": "system", "content": "x"}]}')
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*a user must begin"):
        load(path)
    with capture_logs() as logs:
        load(path, malformed="skip")
    assert told(logs) == [(1, 0, 0)]


def test_messages_that_lack_what_the_template_writes_are_malformed(tmp_path: Path) -> None:
    class Calling(CharTokenizer):
        def apply_chat_template(self, conversation: list[Any], **how: Any) -> str:
            calls = "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
            template = Template("{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}")
            return template.render(messages=conversation)

    asked = '{"role": "user", "content": "What time is it?"}'
    called = '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]}'
    told_it = '{"role": "tool", "content": "noon"}'
    path = write(tmp_path, f'{{"messages": [{asked}, {called}, {told_it}]}}', '{"text": "a"}')
    with pytest.raises(DataError, match=r"train\.jsonl:1: the tokenizer's chat template refuses .*Undefined"):
        load(path, tokenizer=Calling())
    with capture_logs() as logs:
        prompts = load(path, tokenizer=Calling(), malformed="skip")
    assert [row.text for row in prompts.rows] == ["a"]
    assert told(logs) == [(1, 0, 0)]


def test_of_each_held_out_set_the_first_prompts_are_used_and_that_there_are_more_is_told(tmp_path: Path) -> None:
    for name, count in (("few", 3), ("many", 1_319)):
        (tmp_path / name).mkdir()
        numbered(tmp_path / name, count)
    few, many = tmp_path / "few" / "train.jsonl", tmp_path / "many" / "train.jsonl"
    texts, notices = held_out(few, few, many, max_prompts=4)
    assert texts == ["p0", "p1", "p2", "p0", "p1", "p2", "p3"]
    assert notices == [f"{many}: the first 4 of 1,319 prompts are used (validation.max_prompts)"]


def test_held_out_prompts_that_are_trained_on_are_counted_by_tokens_and_fields(tmp_path: Path) -> None:
    trained = load(numbered(tmp_path, 10)).rows
    other = write(tmp_path, '{"text": "p3", "answer": 3}', '{"text": "p4", "answer": 5}', '{"text": "x", "answer": 4}')
    assert num_shared(load(other).rows, trained) == 1
    assert num_shared(trained, trained) == 10


def test_a_template_writes_the_date_of_the_settings_whatever_day_it_is(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}')
    prompts, later = (load(path, tokenizer=tokenizer, **date) for date in ({}, {"date": "2027-02-03"}))
    assert [prompts.rows[0].text, later.rows[0].text] == ["01 Jan 2026: x", "03 Feb 2027: x"]
    assert prompts.fingerprint() != later.fingerprint()


def test_tools_are_rendered_with_their_messages(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [ADD]}
    path = write(tmp_path, json.dumps(chat), '{"text": "a"}')
    rows = load(path, tokenizer=chat_tokenizer()).rows
    assert '"description": "adds two numbers"' in rows[0].text
    assert rows[0].fields["tools"] == [ADD]
    with pytest.raises(DataError, match=r"train\.jsonl:1: the tokenizer's chat template does not render 'tools'"):
        load(path)
    with capture_logs() as logs:
        load(path, malformed="skip")
    assert told(logs) == [(1, 0, 0)]


def test_no_end_token_stands_behind_a_text_that_is_to_be_continued(tmp_path: Path) -> None:
    """As of a tokenizer saved with `add_eos_token`."""
    tokenizer = make_tokenizer()
    end_all_with(tokenizer, EOS)
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id
    [row] = load(write(tmp_path, '{"text": "ab"}'), tokenizer=tokenizer).rows
    assert tokenizer.convert_ids_to_tokens(row.token_ids.tolist()) == ["a", "b"]


def test_a_vocabulary_of_digits_behind_a_begin_token_loses_none_of_a_text(tmp_path: Path) -> None:
    class Digits(CharTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
            known = ["".join(c for c in one if c in "0123456789+=") for one in text]
            return super().__call__(known, add_special_tokens=add_special_tokens)

    [row] = load(write(tmp_path, '{"text": "2+2="}'), tokenizer=Digits()).rows
    assert row.token_ids.tolist() == [1, *map(ord, "2+2=")]


def test_a_prompt_without_tokens_is_malformed(tmp_path: Path) -> None:
    class Bare(CharTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
            return super().__call__(text, add_special_tokens=False)

    path = write(tmp_path, '{"text": "a"}', '{"text": "  "}')
    with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has no tokens"):
        load(path, tokenizer=Bare())


def test_messages_that_the_template_makes_too_long_for_a_ticket_are_malformed(tmp_path: Path) -> None:
    message = '{"role": "user", "content": ""}'
    path = write(tmp_path, '{"text": "a"}', '{"messages": [' + ", ".join([message] * 30_000) + "]}")

    class Wordy(CharTokenizer):
        def apply_chat_template(self, conversation: list[Any], **how: Any) -> str:
            return "".join("<a turn of the user, who says: >" + "." * 10 for _ in conversation)

    with pytest.raises(DataError, match=r"train\.jsonl:2: .*1260000 characters; a ticket carries 1048576"):
        load(path, tokenizer=Wordy(), max_prompt_tokens=1 << 21)
    with capture_logs() as logs:
        load(path, tokenizer=Wordy(), max_prompt_tokens=1 << 21, malformed="skip")
    assert told(logs) == [(1, 0, 0)]


def test_each_pass_over_the_data_asks_for_each_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    prompts = load(numbered(tmp_path, 50))
    located = [prompts.locate(place) for place in range(prompts.num_places(3))]
    passes = [[index for data_epoch, index in located if data_epoch == e] for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert passes[0] != passes[1] != passes[2] != list(range(50))


def test_a_place_has_the_same_prompt_whenever_it_is_asked(tmp_path: Path) -> None:
    path = numbered(tmp_path, 20)
    forwards, backwards = load(path), load(path)
    places = range(20 * 5)
    expected = {place: forwards.locate(place) for place in places}
    assert {place: backwards.locate(place) for place in reversed(places)} == expected


def test_the_order_is_pinned_since_running_jobs_depend_on_it(tmp_path: Path) -> None:
    prompts = load(numbered(tmp_path, 8), seed=1234)
    assert [prompts.locate(place)[1] for place in range(8)] == [7, 3, 0, 1, 4, 2, 5, 6]


def mixed(folder: Path, *weights: float, seed: int = 1, counts: tuple[int, ...] = (4, 6), **settings: Any) -> PromptSet:
    """Datasets a, b, ... of so many rows."""
    train: dict[str, Any] = {}
    for name, count, weight in zip("abc", counts, weights, strict=False):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(count)))
        train[name] = {"path": str(path), "weight": weight}
    data = schema.Data.model_validate({"train": train, **settings})
    return PromptSet.load(tokenizer=CharTokenizer(), data=data, seed=seed)


def test_prompts_of_several_datasets_are_asked_for_by_weight_and_know_where_they_came_from(tmp_path: Path) -> None:
    prompts = mixed(tmp_path, 2.0, 0.5)
    assert [(row.dataset, row.text) for row in prompts.rows] == [
        *(("a", f"a{i}") for i in range(4)),
        *(("b", f"b{i}") for i in range(6)),
    ]
    assert prompts.num_places(3) == 3 * (8 + 3)
    asked = [prompts.rows[prompts.locate(place)[1]].dataset for place in range(11)]
    assert (asked.count("a"), asked.count("b")) == (8, 3)


def test_one_path_and_a_single_dataset_of_weight_one_are_the_same(tmp_path: Path) -> None:
    single = mixed(tmp_path, 1.0)
    data = schema.Data(train=str(tmp_path / "a.jsonl"))
    plain = PromptSet.load(tokenizer=CharTokenizer(), data=data, seed=1)
    assert plain.fingerprint() == single.fingerprint()
    assert [plain.locate(place) for place in range(9)] == [single.locate(place) for place in range(9)]
    assert {row.dataset for row in plain.rows} == {""}


def test_the_fingerprint_of_a_mixture_changes_with_its_weights_and_with_where_a_dataset_ends(tmp_path: Path) -> None:
    same = mixed(tmp_path, 2.0, 0.5).fingerprint()
    assert mixed(tmp_path, 2.0, 0.5).fingerprint() == same
    assert mixed(tmp_path, 2.0, 1.0).fingerprint() != same
    assert mixed(tmp_path, 1.0, 0.5).fingerprint() != same
    assert mixed(tmp_path, 1.0, 1.0).fingerprint() != mixed(tmp_path, 1.0, 1.0, counts=(4, 5)).fingerprint()
    assert mixed(tmp_path, 2.0).fingerprint() != mixed(tmp_path, 1.0).fingerprint()


def test_a_dataset_without_usable_prompts_is_named_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.train\.b\.path: .*b\.jsonl holds no prompts"):
        mixed(tmp_path, 1.0, 1.0, counts=(3, 0))


def test_what_was_left_out_is_told_of_each_dataset(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "abcdef"}\n{"text": "x"}\n{\n')
    train = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"}
    settings = {"max_prompt_tokens": 3, "overlong": "skip", "malformed": "skip"}
    data = schema.Data.model_validate({"train": train, **settings})
    with capture_logs() as logs:
        PromptSet.load(tokenizer=CharTokenizer(), data=data, seed=1)
    assert told(logs) == [(1, 1, 0), (1, 1, 0)]


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    prompts = load(numbered(tmp_path, 5), shuffle=False)
    assert [prompts.locate(place) for place in range(7)] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]


def test_the_fingerprint_changes_with_whatever_changes_what_a_place_means(tmp_path: Path) -> None:
    path = numbered(tmp_path, 5)
    same = load(path).fingerprint()
    assert load(path).fingerprint() == same
    assert load(path, seed=2).fingerprint() != same
    assert load(path, shuffle=False).fingerprint() != same
    path.write_text(path.read_text().replace('"answer": 3', '"answer": 4'))
    assert load(path).fingerprint() != same
    assert load(numbered(tmp_path, 6)).fingerprint() != same
