"""Turns an agent's chat messages into tokens: prompts go through the chat template, sampled answers keep their tokens.

    an earlier turn's messages, its answer, more     the tokens of that turn, then only what the template writes after
                                                     the answer
    anything else                                    all of it as the template writes it

An agent sends back messages, not tokens. Messages of an earlier turn are recognised by role, content and tool calls,
whatever the ids of the calls.
Their tokens are reused only if the template still renders the part before the answer as it did then, and the answer
unchanged. A template that drops old reasoning does not, and an agent that shortens its history does not match: then
everything is rendered and tokenized again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamrl.data.messages import parsed
from streamrl.encoding import Continuations, encode
from streamrl.errors import SampleError
from streamrl.workers.sessions.tool_calls import Reply, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "streamrl-answer"  # text that no template contains

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The model's prompt for one turn."""

    token_ids: npt.NDArray[np.int32]
    given: str  # the text that is new in it, for rewards and people
    rendered: str = ""  # the template's rendering, if it is a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    messages: tuple[Message, ...]  # the prompt's messages, and the answer
    tools: str
    prompt_text: str  # the prompt as the template rendered it
    token_ids: npt.NDArray[np.int32]  # prompt and answer


class Conversation:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, date: str) -> None:
        self._tokenizer: Any = tokenizer
        self._date = date
        self._behind = Continuations(tokenizer)
        self._ends = [str(tokenizer.decode([stop_id])) for stop_id in stop_ids]
        self._turns: list[_Turn] = []

    @property
    def knows_tools(self) -> bool:
        from streamrl.chat_templates import renders_tools  # needs transformers, checked for at start

        return renders_tools(self._tokenizer)

    def context(self, messages: Sequence[Message], tools: Tools) -> Context:
        """Build the prompt. SampleError if the template refuses the messages."""
        full_text = self._render(messages, tools, generation_prompt=True)
        for turn in sorted(self._turns, key=lambda turn: -len(turn.messages)):
            num_messages = len(turn.messages)
            if not (_begins_with(messages, turn, tools) and full_text.startswith(turn.prompt_text)):
                continue
            tail = self._tail(messages, num_messages, tools, after_prompt=full_text[len(turn.prompt_text) :])
            if tail is not None:
                [tail_ids] = self._behind.encode([tail])
                ids = _without_end(tail_ids, turn.token_ids)
                return Context(
                    token_ids=np.concatenate([turn.token_ids, np.asarray(ids, dtype=np.int32)]),
                    given=_contents(messages[num_messages:]),
                    rendered=full_text,
                )
        [ids] = encode(self._tokenizer, [full_text])  # the template added the special tokens
        return Context(token_ids=np.asarray(ids, dtype=np.int32), given=_contents(messages), rendered=full_text)

    def record_turn(
        self,
        context: Context,
        answer_ids: npt.NDArray[np.int32],
        *,
        messages: Sequence[Message],
        tools: Tools,
        reply: Reply,
    ) -> None:
        """Record a finished turn: its prompt and the model's answer."""
        self._turns.append(
            _Turn(
                messages=(*messages, answer_of(reply)),
                tools=json.dumps(tools, sort_keys=True),
                prompt_text=context.rendered,
                token_ids=np.concatenate([context.token_ids, answer_ids]),
            )
        )

    def _tail(self, messages: Sequence[Message], num_messages: int, tools: Tools, *, after_prompt: str) -> str | None:
        """Return what the template writes after the answer, the last of the first `num_messages` messages. None if it
        changes the answer, or if the answer's end cannot be found."""
        answer = messages[num_messages - 1]
        if answer["content"].strip() not in after_prompt:
            return None
        marked = [*messages[: num_messages - 1], _marked(answer), *messages[num_messages:]]
        up_to_answer = self._render(marked[:num_messages], tools, generation_prompt=False)
        full_text = self._render(marked, tools, generation_prompt=True)
        end = up_to_answer.rfind(_MARK) + len(_MARK)
        if _MARK not in up_to_answer or not full_text.startswith(up_to_answer[:end]):
            return None
        rest = full_text[end:]
        ends = [found_at for found_at in (rest.find(end) for end in self._ends) if found_at >= 0]
        if ends:
            return rest[min(ends) :]
        return None if answer.get("tool_calls") else rest

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        from streamrl.chat_templates import TEMPLATE_ERRORS, render  # needs transformers, checked for at start

        try:
            return render(self._tokenizer, messages, date=self._date, tools=tools, generation_prompt=generation_prompt)
        except TEMPLATE_ERRORS as error:
            raise SampleError(f"the model's chat template rejects the messages: {error}") from None


def answer_of(reply: Reply) -> Message:
    """Return the message that an agent would send back, in the form of `read_messages`."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.calls:
        message["tool_calls"] = [_call(call.name, call.arguments, call.id) for call in reply.calls]
    return message


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Normalise messages to the form that templates expect. ValueError if they are not chat messages."""
    return [_normalised(index, message) for index, message in enumerate(messages)]


def _normalised(index: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError(f"messages[{index}] must have a role and a content")
    normalised: dict[str, Any] = {"role": "system" if role == "developer" else role}
    normalised["content"] = _text(message.get("content"), index)
    normalised |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if message.get("tool_calls"):
        try:
            normalised["tool_calls"] = [
                _call(call["function"]["name"], call["function"]["arguments"], call.get("id"))
                for call in message["tool_calls"]
            ]
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"messages[{index}].tool_calls must be a list of function calls") from None
    return normalised


def _call(name: str, arguments: Any, call_id: Any) -> dict[str, Any]:
    """Parse the arguments: templates want a map, APIs send JSON in a string. Some templates find a tool's name by its
    call's id, or write the id."""
    named = {"id": call_id} if isinstance(call_id, str) and call_id else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": parsed(arguments)}}


def _text(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    try:
        if all(part["type"] == "text" for part in content):
            return "".join(part["text"] for part in content)
    except (TypeError, KeyError):
        pass
    raise ValueError(f"messages[{index}].content must be text: the model takes no other input")


def _begins_with(messages: Sequence[Message], turn: _Turn, tools: Tools) -> bool:
    num_messages = len(turn.messages)
    return (
        len(messages) > num_messages
        and all(map(_is_same, messages, turn.messages))
        and json.dumps(tools, sort_keys=True) == turn.tools
    )


def _is_same(one: Message, other: Message) -> bool:
    return all(one.get(key) == other.get(key) for key in ("role", "content")) and _called(one) == _called(other)


def _called(message: Message) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _marked(answer: Message) -> Message:
    """Put the mark into the answer, as close to its end as possible."""
    calls = answer.get("tool_calls")
    if not calls:
        return {**answer, "content": _MARK}
    function = {**calls[-1]["function"], "arguments": {"mark": _MARK}}
    return {**answer, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def _without_end(tail: list[int], before: npt.NDArray[np.int32]) -> list[int]:
    """Drop the tail's end token if the answer ended with it."""
    return tail[1:] if tail and len(before) and tail[0] == int(before[-1]) else tail


def _contents(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
