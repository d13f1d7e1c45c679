"""Chat messages and tools as files and agents give them, in the form that chat templates take.

APIs write the arguments of a call as JSON in a string, and null for the content of an answer that only calls; templates
want a map, and a text. Datasets on a hub hold tools as JSON too, since a column's rows all have the same keys.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any


def for_templates(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its calls in that form; all else in it stays as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "content": message.get("content") or "", "tool_calls": list(map(_with_arguments, calls))}


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call  # the template says what it misses
    return {**call, "function": {**function, "arguments": parsed(function["arguments"])}}


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the functions that a row's field defines, in the form of OpenAI's API; None if it holds anything else."""
    tools = parsed(value)
    is_tools = isinstance(tools, list) and tools and all(map(_is_function, tools))
    return tools if is_tools else None


def _is_function(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)


def parsed(value: Any) -> Any:
    """Return what JSON in a string says; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # it goes on in messages and in texts
            return found
    return value
