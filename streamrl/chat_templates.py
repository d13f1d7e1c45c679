"""Renders messages with a tokenizer's chat template, and says what a template raises when it refuses them.

Importing this requires jinja2, which comes with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from jinja2 import TemplateError

# Also when messages lack what the template writes.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError)


class Renders(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[Any], **how: Any) -> Any: ...


def render(
    tokenizer: Renders,
    messages: Sequence[Any],
    *,
    date: str,
    tools: Sequence[Any] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Render messages up to where the model's answer begins, or up to their own end. Raises TEMPLATE_ERRORS.

    `date`, such as 2026-01-01, is what the template takes for today. By the clock, a run's prompts would be others on
    the next day: its tickets would mean something else, and an agent's turns would not go on from each other.
    """
    return str(
        tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools or ()) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            strftime_now=datetime.fromisoformat(date).strftime,
        )
    )


def renders_tools(tokenizer: Renders) -> bool:
    return "tools" in str(tokenizer.chat_template)
