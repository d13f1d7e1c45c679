"""What reward models read behind a chat's answer. They were trained on whole messages, as the chat template writes them
to the end, and most score a text by its last token; a completion has neither its end token nor what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "streamrl-answer"  # text that no template contains


def ends_of(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> Mapping[int, str]:
    """Return for each end token its text, with what the template writes after it if that is how it ends an answer."""
    texts = {token_id: str(tokenizer.decode([token_id], skip_special_tokens=False)) for token_id in stop_ids}
    after = after_an_answer(tokenizer)
    return {token_id: after if after.startswith(text) else text for token_id, text in texts.items()}


def after_an_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes from an answer's end on; empty if that cannot be told."""
    from streamrl.chat_templates import TEMPLATE_ERRORS  # needs transformers

    if not tokenizer.chat_template:
        return ""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False)).partition(_MARK)[2]
    except TEMPLATE_ERRORS:
        return ""
