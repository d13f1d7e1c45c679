"""Calls of tools in what a model said: where they stand, what they are, and what is left as words.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as ChatML models with tools are taught
    else     one of vLLM's own parsers, by its name there, where vLLM is installed

What looks like a call and is none stays among the words: the agent is told what was said, and may say so.
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
class Said:
    content: str
    calls: tuple[ToolCall, ...] = ()


Tools = Sequence[Mapping[str, Any]]  # as OpenAI's interface has them
Parse = Callable[[str, Tools], Said]


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    return parse_hermes if name == HERMES else _parser_of_vllm(name, tokenizer)


def parse_hermes(text: str, tools: Tools) -> Said:
    """One call that is none makes all of it words, as in vLLM."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return Said(content=text)
        if not isinstance(name, str):
            return Said(content=text)
        calls.append(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return Said(content=text.partition("<tool_call>")[0] if calls else text, calls=tuple(calls))


def _parser_of_vllm(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        raise ConfigError(
            f"environment.tool_parser: {name!r} is not {HERMES}, and vLLM, which has others, is not installed here"
        ) from None
    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"environment.tool_parser: vLLM has no {name!r}; it has {known}") from None

    def parse(text: str, tools: Tools) -> Said:
        request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools], model="")
        parser = kind(
            cast("Any", tokenizer), cast("Any", request.tools)
        )  # vLLM's own types for them are wider, or other
        found = parser.extract_tool_calls(text, request)
        calls = [ToolCall(name=one.function.name, arguments=one.function.arguments) for one in found.tool_calls]
        return Said(content=found.content or "", calls=tuple(calls) if found.tools_called else ())

    return parse
