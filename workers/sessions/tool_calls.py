"""Parses tool calls out of a model's text, and separates them from the remaining text.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, the format of ChatML models with tools
    else     one of vLLM's parsers, by its name there, if vLLM is installed

What looks like a call but is not valid stays in the text: the agent sees what was generated, and can react. A call's id
is the parser's where templates require its form, as Mistral's and Kimi's do; else the session gives one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import structlog

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERMES = "hermes"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_RANDOM_ID = "chatcmpl-tool-"  # begins the ids of vLLM's parsers for models that need none

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    content: str
    calls: tuple[ToolCall, ...] = ()

    def with_ids(self, turn: int) -> Reply:
        """Give an id to each call that has none: nine letters and digits, the only form that all templates accept."""
        named = (replace(call, id=call.id or f"c{turn:05}{index:03}") for index, call in enumerate(self.calls))
        return replace(self, calls=tuple(named))


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
        if not (isinstance(name, str) and isinstance(arguments, dict)):  # chat templates count on both
            return Reply(content=text)
        calls.append(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return _reply(text, content=text.partition("<tool_call>")[0] if calls else text, calls=calls)


def _reply(text: str, *, content: str, calls: Sequence[ToolCall]) -> Reply:
    """Return the calls, unless one holds half a surrogate pair, as JSON can escape it: no response could carry that."""
    try:
        for call in calls:
            (call.name + call.arguments).encode()
    except UnicodeEncodeError:
        return Reply(content=text)
    return Reply(content=content, calls=tuple(calls))


def _parser_of_vllm(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers.hf import get_cached_tokenizer
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
    cached = cast("Any", get_cached_tokenizer(cast("Any", tokenizer)))  # parsers read the whole vocabulary each time
    try:
        kind(cached)
    except Exception as error:  # each parser raises its own if the tokenizer lacks its tokens
        raise ConfigError(f"environment.tool_parser: {name!r} does not fit this model's tokenizer: {error}") from error

    def parse(text: str, tools: Tools) -> Reply:
        request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools], model="")
        try:
            found = kind(cached, cast("Any", request.tools)).extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001 - it parses what a model wrote
            log.warning("tool_calls_not_parsed", parser=name, error=str(error))
            return Reply(content=text)
        if not found.tools_called:
            return Reply(content=found.content or "")
        return _reply(text, content=found.content or "", calls=[_call_of(call) for call in found.tool_calls])

    return parse


def _call_of(call: Any) -> ToolCall:
    own_id = "" if call.id.startswith(_RANDOM_ID) else call.id
    return ToolCall(name=call.function.name, arguments=call.function.arguments, id=own_id)
