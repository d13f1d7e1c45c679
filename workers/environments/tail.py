"""What a turn is asked for with: the tokens so far, and behind them what the model was given since.

What was sampled is not tokenised again: only the tail behind it is new. In a conversation that tail is what the
model's own template writes after an answer, its end token included, up to where the next answer begins:

    sampled      4 2 <|im_end|>
    tail                        \\n <|im_start|> user \\n too low <|im_end|> \\n <|im_start|> assistant \\n
    sampled                                                                                           ...

An answer that was cut off has no end token; the tail begins with it then. White space round an answer is the
template's affair, and what was sampled stays. A template that writes an earlier answer otherwise, as those do that drop
what a model thought, is followed: the conversation is rendered and tokenised anew, and the turn starts a branch.
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
        """Behind a prompt that is plain text: the words as they are."""
        token_ids: list[int] = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        return token_ids

    def of_chat(self, said: Sequence[Any], so_far: Ids) -> tuple[Ids, list[int]]:
        """(tokens so far that the next turn goes on from, those behind them). `said` are the messages, the last two an
        answer and what was given to it; `so_far` ends with that answer, as it was sampled."""
        before, whole = self._rendered(said[:-2]), self._rendered(said)
        answer = str(said[-2]["content"])
        for written in (answer, answer.rstrip(), answer.strip()):
            if whole.startswith(before + written):
                token_ids = self.of_text(whole[len(before + written) :])
                ended = so_far[-1:].tolist() == token_ids[:1]
                return so_far, token_ids[1:] if ended else token_ids
        return so_far[:0], self.of_text(whole)

    def _rendered(self, said: Sequence[Any]) -> str:
        """Up to where the next answer begins."""
        from jinja2 import TemplateError  # comes with transformers, which a worker looks for before it begins

        try:
            return str(self._tokenizer.apply_chat_template(list(said), tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError) as error:  # a template may reach into what is not there
            raise SampleError(f"the chat template refuses what the environment said: {error}") from None
