"""Conversations in tokens: what was sampled stays as it was, where the template would have it so."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from streamrl.data.settings import DATE
from streamrl.errors import ConfigError, SampleError
from streamrl.workers.sessions.conversation import Context, Conversation, answer_of, read_messages
from streamrl.workers.sessions.tool_calls import Reply, ToolCall, make_parser, parse_hermes
from tests.session_world import ADD, CALL, chat_tokenizer

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "2 + 3"}
MORE = {"role": "user", "content": "go on"}


class Talk:
    def __init__(self, template: str | None = None, tools: Any = ()) -> None:
        self.tokenizer = chat_tokenizer()
        if template is not None:
            self.tokenizer.chat_template = template
        self.tools = tools
        self.conversation = Conversation(self.tokenizer, [self.tokenizer.eos_token_id], date=DATE)

    def ask(self, *messages: Any) -> Context:
        return self.conversation.context(read_messages(messages), self.tools)

    def say(self, text: str, *messages: Any, ended: bool = True) -> tuple[Any, list[int]]:
        """The answer as an agent sends it back, and all tokens so far."""
        context, said = self.ask(*messages), parse_hermes(text, self.tools)
        ids = self.tokenizer(text + "<|im_end|>" * ended, add_special_tokens=False)["input_ids"]
        self.conversation.record_turn(
            context, np.array(ids, np.int32), messages=read_messages(messages), tools=self.tools, reply=said
        )
        return answer_of(said), [*context.token_ids.tolist(), *ids]

    def behind(self, so_far: list[int], context: Context) -> str:
        ids = context.token_ids.tolist()
        assert ids[: len(so_far)] == so_far
        text: str = self.tokenizer.decode(ids[len(so_far) :])
        return text


@pytest.mark.parametrize(("ended", "begins"), [(True, "\n<|im_start|>user"), (False, "<|im_end|>\n<|im_start|>user")])
def test_an_answer_keeps_its_tokens_and_gets_its_end_where_it_was_cut_off(ended: bool, begins: str) -> None:
    talk = Talk()
    answer, so_far = talk.say("  five \n", USER, ended=ended)
    assert talk.behind(so_far, talk.ask(USER, answer, MORE)).startswith(begins)


def test_a_call_keeps_its_tokens_though_the_template_would_write_it_otherwise() -> None:
    talk = Talk(tools=[ADD])
    answer, so_far = talk.say(CALL, USER)
    told = {"role": "tool", "tool_call_id": "1", "content": "5"}
    context = talk.ask(USER, answer, told)
    assert CALL not in talk.tokenizer.apply_chat_template([USER, answer], tokenize=False)
    assert talk.behind(so_far, context) == (
        "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert context.given == "5"


BY_ID = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for call in m.tool_calls or [] %}{{ call.id }}={{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# tools #}"
)


def test_a_template_sees_the_ids_of_calls_and_an_agent_may_change_them() -> None:
    talk = Talk(BY_ID, tools=[ADD])
    answer = answer_of(parse_hermes(CALL, [ADD]).with_ids(1))
    [call] = answer["tool_calls"]
    told = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    written = talk.tokenizer.decode(talk.ask(USER, answer, told).token_ids)
    assert f"{call['id']}={{" in written
    assert f"{call['id']}: 5" in written
    said, so_far = talk.say(CALL, USER)
    for other in ({}, {"id": "call_7"}):
        sent = {**said, "tool_calls": [{**other, "type": "function", "function": call["function"]}]}
        assert talk.ask(USER, sent, told).token_ids[: len(so_far)].tolist() == so_far


def test_each_call_of_a_rollout_has_an_id_that_every_template_accepts() -> None:
    turns = [parse_hermes(CALL + CALL, [ADD]).with_ids(turn) for turn in (1, 2)]
    ids = [call.id for reply in turns for call in reply.calls]
    assert len(set(ids)) == len(ids) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids), "Mistral's templates insist on it"
    kept = Reply(content="", calls=(ToolCall(name="add", arguments="{}", id="functions.add:0"),))
    assert kept.with_ids(3) == kept, "a parser knows what its model's template wants"


@pytest.mark.parametrize("arguments", ['"{}"', "[1, 2]", "null", "7"])
def test_a_call_whose_arguments_have_no_names_is_words(arguments: str) -> None:
    """Templates write them by name, and would raise at what the agent rightly sends back."""
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    assert parse_hermes(text, [ADD]) == Reply(content=text)


@pytest.mark.parametrize("where", ["name", "arguments"])
def test_a_call_with_half_a_character_is_words(where: str) -> None:
    call = {"name": "say", "arguments": {"t": "x"}} | ({"name": "s\ud83d"} if where == "name" else {})
    call = call if where == "name" else {**call, "arguments": {"t": "\ud83d"}}
    text = f"<tool_call>{json.dumps(call)}</tool_call>"
    assert parse_hermes(text, []) == Reply(content=text)


def test_a_template_writes_the_run_s_date_on_every_day() -> None:
    talk = Talk("{{ strftime_now('%d %b %Y') }}" + THINKING)
    answer, so_far = talk.say("five", USER)
    assert talk.tokenizer.decode(so_far).startswith("01 Jan 2026<|im_start|>user")
    talk.behind(so_far, talk.ask(USER, answer, MORE))


def test_of_several_conversations_each_goes_on_by_itself() -> None:
    talk = Talk()
    of_one, one = talk.say("a", USER)
    of_other, other = talk.say("b", USER)
    talk.behind(one, talk.ask(USER, of_one, MORE))
    talk.behind(other, talk.ask(USER, of_other, MORE))


@pytest.mark.parametrize(
    "changed",
    [
        lambda answer: [{**answer, "content": "six"}],
        lambda answer: [{**answer, "content": [{"type": "text", "text": "six"}]}],
        lambda answer: [],
        lambda answer: [{"role": "user", "content": "before"}, answer],
    ],
)
def test_what_the_session_has_not_said_is_written_by_the_template(changed: Any) -> None:
    talk = Talk()
    answer, _ = talk.say("five", USER)
    messages = [USER, *changed(answer), MORE]
    written = talk.tokenizer.apply_chat_template(read_messages(messages), tokenize=False, add_generation_prompt=True)
    assert talk.tokenizer.decode(talk.ask(*messages).token_ids) == written


def test_a_template_that_drops_what_was_thought_is_followed() -> None:
    talk = Talk(THINKING)
    answer, so_far = talk.say("<think>hm</think>five", USER)
    context = talk.ask(USER, answer, MORE)
    assert context.token_ids[: len(so_far)].tolist() != so_far
    assert "hm" not in talk.tokenizer.decode(context.token_ids)


def test_two_forms_of_the_same_message_are_the_same() -> None:
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert read_messages(parts) == [{"role": "system", "content": "ab"}]
    assert read_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]


def test_what_a_template_refuses_is_told() -> None:
    with pytest.raises(SampleError, match=r"chat template rejects the messages: no system here"):
        Talk("{{ raise_exception('no system here') }}").ask(USER)


def test_several_calls_are_several() -> None:
    said = parse_hermes(f"so: {CALL}\n{CALL}", [])
    assert (said.content, [call.name for call in said.calls]) == ("so: ", ["add", "add"])
    assert parse_hermes(CALL.removesuffix("</tool_call>"), []).calls, "its end may be a stop string"
    assert parse_hermes("no call", []) == Reply(content="no call")


@pytest.mark.long  # what vLLM's parsers import takes its time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_parser_of_vllms_is_named_as_there() -> None:
    tokenizer = chat_tokenizer()
    parse = make_parser("pythonic", tokenizer)
    said = parse("[add(a=2, b=3)]", [ADD])
    assert [(call.name, call.arguments) for call in said.calls] == [("add", '{"a": 2, "b": 3}')]
    assert parse("five", [ADD]) == Reply(content="five")
    with pytest.raises(ConfigError, match=r"environment\.tool_parser: vLLM has no 'none'; it has .*pythonic"):
        make_parser("none", tokenizer)
    with pytest.raises(ConfigError, match=r"tool_parser: 'deepseek_v3' does not fit this model's tokenizer: \w+"):
        make_parser("deepseek_v3", tokenizer)
    assert said.with_ids(1).calls[0].id == "c00001000", "vLLM's random ids are no template's"


@pytest.mark.long  # what vLLM's parsers import takes its time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_parser_of_vllms_stumbles_over_is_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tool_parsers import ToolParserManager

    def stumble(*arguments: Any) -> None:
        raise RuntimeError("I know no such thing")

    parse = make_parser("pythonic", chat_tokenizer())
    monkeypatch.setattr(ToolParserManager.get_tool_parser("pythonic"), "extract_tool_calls", stumble)
    assert parse("[add(a=2, b=3)]", [ADD]) == Reply(content="[add(a=2, b=3)]")
