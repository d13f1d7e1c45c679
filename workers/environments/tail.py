"""The tokens that stand between two turns of the model: what it was given, and what the chat template puts round it.

What was sampled is never tokenised again: only the tail behind it is new. In a conversation that tail is what the
model's own template writes after an answer, its end token included, up to where the next answer begins:

    sampled      4 2 <|im_end|>
    tail                        \\n <|im_start|> user \\n too low <|im_end|> \\n <|im_start|> assistant \\n
    sampled                                                                                           ...

An answer that was cut off has no end token; the tail begins with it then. It is rendered behind an answer of its own
that stands for any: a template that would write the same words otherwise behind another answer is not seen by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.errors import SampleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "streamrl-answer"  # which no template writes by itself


class Tail:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def of_text(self, given: str) -> list[int]:
        """Behind a prompt that is plain text: the words as they are."""
        token_ids: list[int] = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        return token_ids

    def of_chat(self, given: str, *, last: int) -> list[int]:
        """As a message of the user's; `last` is the token that the model's turn ended with."""
        token_ids = self.of_text(self._rendered(given))
        return token_ids[1:] if token_ids and token_ids[0] == last else token_ids

    def _rendered(self, given: str) -> str:
        """From the end of an answer to the begin of the next."""
        from jinja2 import TemplateError  # comes with transformers, which a worker looks for before it begins

        said = [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANSWER}]
        try:
            before = self._template(said, asks=False)
            whole = self._template([*said, {"role": "user", "content": given}], asks=True)
        except TemplateError as error:
            raise SampleError(f"the chat template refuses what the environment said: {error}") from None
        answered = before.find(_ANSWER)
        if answered < 0 or not whole.startswith(before):
            raise SampleError(
                "the model's chat template writes earlier answers otherwise once another message follows: a rollout of "
                "several turns cannot keep its tokens; give the model a template that only appends"
            )
        return whole[answered + len(_ANSWER) :]

    def _template(self, messages: list[dict[str, str]], *, asks: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
