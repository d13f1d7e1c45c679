"""Builds the prompt of the next turn: the tokens so far, plus what the model is given next.

Sampled tokens are never tokenized again; only the tail after them is new. In a conversation the tail is what the
model's chat template writes after an answer, its end token included, up to where the next answer begins:

    sampled      4 2 <|im_end|>
    tail                        \\n <|im_start|> user \\n too low <|im_end|> \\n <|im_start|> assistant \\n
    sampled                                                                                           ...

A truncated answer has no end token; then the tail starts with it. Templates may strip white space around an answer; the
sampled tokens stay as they are. If a template rewrites an earlier answer (for example, drops its reasoning), the
conversation is rendered and tokenized again, and the turn starts a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamrl.errors import SampleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]


class Tail:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def of_text(self, given: str) -> list[int]:
        """Tokenize text that follows a plain-text prompt, as it is."""
        token_ids: list[int] = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        return token_ids

    def of_chat(self, messages: Sequence[Any], so_far: Ids) -> tuple[Ids, list[int]]:
        """Return (the tokens so far to continue from, the new tokens after them). `messages` are all messages, the last
        two being an answer and what was given in reply; `so_far` ends with that answer as it was sampled."""
        before, whole = self._rendered(messages[:-2]), self._rendered(messages)
        answer = str(messages[-2]["content"])
        for rendered in (answer, answer.rstrip(), answer.strip()):
            if whole.startswith(before + rendered):
                token_ids = self.of_text(whole[len(before + rendered) :])
                ended = so_far[-1:].tolist() == token_ids[:1]
                return so_far, token_ids[1:] if ended else token_ids
        return so_far[:0], self.of_text(whole)

    def _rendered(self, messages: Sequence[Any]) -> str:
        """Render the messages up to where the next answer begins."""
        from streamrl.chat_templates import TEMPLATE_ERRORS  # needs transformers, checked for at start

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except TEMPLATE_ERRORS as error:
            raise SampleError(f"the chat template rejects the environment's text: {error}") from None
