"""Parses tool calls out of a model's text, and separates them from the remaining text.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, the format of ChatML models with tools
    else     one of vLLM's parsers, by its name there, if vLLM is installed

What looks like a call but is not valid stays in the text: the agent sees what was generated, and can react.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERMES = "hermes"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    content: str
    calls: tuple[ToolCall, ...] = ()


Tools = Sequence[Mapping[str, Any]]  # in the format of OpenAI's API
Parse = Callable[[str, Tools], Reply]


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    return parse_hermes if name == HERMES else _parser_of_vllm(name, tokenizer)


def parse_hermes(text: str, tools: Tools) -> Reply:
    """Parse Hermes calls. As in vLLM, one invalid call makes all of it text."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return Reply(content=text)
        if not isinstance(name, str):
            return Reply(content=text)
        calls.append(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return Reply(content=text.partition("<tool_call>")[0] if calls else text, calls=tuple(calls))


def _parser_of_vllm(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        raise ConfigError(
            f"environment.tool_parser: {name!r} needs vLLM, which is not installed; without it only {HERMES!r} works"
        ) from None
    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"environment.tool_parser: vLLM has no {name!r}; it has {known}") from None

    def parse(text: str, tools: Tools) -> Reply:
        request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools], model="")
        parser = kind(
            cast("Any", tokenizer), cast("Any", request.tools)
        )  # vLLM declares wider or other types for these
        found = parser.extract_tool_calls(text, request)
        calls = [ToolCall(name=call.function.name, arguments=call.function.arguments) for call in found.tool_calls]
        return Reply(content=found.content or "", calls=tuple(calls) if found.tools_called else ())

    return parse
