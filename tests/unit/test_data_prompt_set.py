from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template, TemplateError
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.groups.prompts import PromptSet


class CharTokenizer:
    """One token a character, and a 1 in front unless special tokens are off; a chat template that wants a user."""

    def __init__(self, *, chat_template: str | None = "there is one") -> None:
        self.chat_template = chat_template

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        start = [1] if add_special_tokens else []
        return {"input_ids": [start + [ord(c) for c in t.strip()] for t in text]}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
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


def load(path: Path, *, seed: int = 1, tokenizer: CharTokenizer | None = None, **settings: Any) -> PromptSet:
    data = schema.Data(train=str(path), **settings)
    return PromptSet.load(tokenizer=tokenizer or CharTokenizer(), data=data, seed=seed)


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
        def apply_chat_template(self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
            calls = "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
            template = Template("{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}")
            return template.render(messages=conversation)

    asked = '{"role": "user", "content": "What time is it?"}'
    called = '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]}'
    path = write(tmp_path, f'{{"messages": [{asked}, {called}]}}', '{"text": "a"}')
    with pytest.raises(DataError, match=r"train\.jsonl:1: the tokenizer's chat template refuses .*Undefined"):
        load(path, tokenizer=Calling())
    with capture_logs() as logs:
        prompts = load(path, tokenizer=Calling(), malformed="skip")
    assert [row.text for row in prompts.rows] == ["a"]
    assert told(logs) == [(1, 0, 0)]


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
        def apply_chat_template(self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
            return "".join("<a turn of the user, who says: >" + "." * 10 for _ in conversation)

    with pytest.raises(DataError, match=r"train\.jsonl:2: .*1260000 characters; a ticket carries 1048576"):
        load(path, tokenizer=Wordy(), max_prompt_tokens=1 << 21)
    with capture_logs() as logs:
        load(path, tokenizer=Wordy(), max_prompt_tokens=1 << 21, malformed="skip")
    assert told(logs) == [(1, 0, 0)]


def test_each_pass_over_the_data_asks_for_each_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    prompts = load(numbered(tmp_path, 50))
    located = [prompts.locate(ticket) for ticket in range(prompts.num_tickets(3))]
    passes = [[index for data_epoch, index in located if data_epoch == e] for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert passes[0] != passes[1] != passes[2] != list(range(50))


def test_a_ticket_asks_for_the_same_prompt_whenever_it_is_asked(tmp_path: Path) -> None:
    path = numbered(tmp_path, 20)
    forwards, backwards = load(path), load(path)
    tickets = range(20 * 5)
    expected = {ticket: forwards.locate(ticket) for ticket in tickets}
    assert {ticket: backwards.locate(ticket) for ticket in reversed(tickets)} == expected


def test_the_order_is_pinned_since_running_jobs_depend_on_it(tmp_path: Path) -> None:
    prompts = load(numbered(tmp_path, 8), seed=1234)
    assert [prompts.locate(ticket)[1] for ticket in range(8)] == [7, 3, 0, 1, 4, 2, 5, 6]


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
    assert prompts.num_tickets(3) == 3 * (8 + 3)
    asked = [prompts.rows[prompts.locate(ticket)[1]].dataset for ticket in range(11)]
    assert (asked.count("a"), asked.count("b")) == (8, 3)


def test_one_path_and_a_single_dataset_of_weight_one_are_the_same(tmp_path: Path) -> None:
    single = mixed(tmp_path, 1.0)
    data = schema.Data(train=str(tmp_path / "a.jsonl"))
    plain = PromptSet.load(tokenizer=CharTokenizer(), data=data, seed=1)
    assert plain.fingerprint() == single.fingerprint()
    assert [plain.locate(ticket) for ticket in range(9)] == [single.locate(ticket) for ticket in range(9)]
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
    assert [prompts.locate(ticket) for ticket in range(7)] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]


def test_the_fingerprint_changes_with_whatever_changes_what_a_ticket_means(tmp_path: Path) -> None:
    path = numbered(tmp_path, 5)
    same = load(path).fingerprint()
    assert load(path).fingerprint() == same
    assert load(path, seed=2).fingerprint() != same
    assert load(path, shuffle=False).fingerprint() != same
    path.write_text(path.read_text().replace('"answer": 3', '"answer": 4'))
    assert load(path).fingerprint() != same
    assert load(numbered(tmp_path, 6)).fingerprint() != same
