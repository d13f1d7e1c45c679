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

from streamrl.encoding import Continuations, encode
from streamrl.errors import SampleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]


class Tail:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, date: str) -> None:
        self._tokenizer, self._date = tokenizer, date
        self._behind = Continuations(tokenizer)

    def of_text(self, given: str) -> list[int]:
        """Tokenize text that follows other text, as it is."""
        [token_ids] = self._behind.encode([given])
        return token_ids

    def of_chat(
        self, messages: Sequence[Any], so_far: Ids, *, tools: Sequence[Any] | None = None
    ) -> tuple[Ids, list[int]]:
        """Return (the tokens so far to continue from, the new tokens after them). `messages` are all messages, the last
        two being an answer and what was given in reply; `so_far` ends with that answer as it was sampled."""
        before, whole = self._rendered(messages[:-2], tools), self._rendered(messages, tools)
        answer = str(messages[-2]["content"])
        for rendered in (answer, answer.rstrip(), answer.strip()):
            if whole.startswith(before + rendered):
                token_ids = self.of_text(whole[len(before + rendered) :])
                ended = so_far[-1:].tolist() == token_ids[:1]
                return so_far, token_ids[1:] if ended else token_ids
        [token_ids] = encode(self._tokenizer, [whole])
        return so_far[:0], token_ids

    def _rendered(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
        """Render the messages up to where the next answer begins."""
        from streamrl.chat_templates import TEMPLATE_ERRORS, render  # needs transformers, checked for at start

        try:
            return render(self._tokenizer, messages, date=self._date, tools=tools)
        except TEMPLATE_ERRORS as error:
            raise SampleError(f"the chat template rejects the environment's text: {error}") from None
