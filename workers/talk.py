"""Chats with a model: one answer at a time, streamed as pieces of text. Plain transformers, no engine.

    messages ─► the tokenizer's chat template ─┐
    a text to continue ────────────────────────┴─► a forward pass per token ─► pieces of text ─► finish reason

Tokens are sampled as in the workers' transformers engine. Everything runs in the caller's thread, and Ctrl-C ends an
answer between two tokens. Blocks on loading the model, and on a forward pass per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.initialization import no_init_weights

from streamrl.chat_templates import TEMPLATE_ERRORS, render
from streamrl.config import schema
from streamrl.encoding import encode, encode_prompts
from streamrl.errors import DataError
from streamrl.protocol.wire.sample import FinishReason
from streamrl.workers.engines.hf_model import RowState, build_model, choose, load_weights, processed_logprobs
from streamrl.workers.engines.model import ModelFacts, read_model

Message = Mapping[str, str]  # {"role": ..., "content": ...}
_INCOMPLETE = "\ufffd"  # what a tokenizer decodes for a character whose last bytes have not come yet


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer that grows while it is generated."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: not finished


def load_speaker(path: str, *, seed: int, weights: Path | None = None, dtype: str = "auto") -> Speaker:
    """Load a model by folder or name, with its own weights or with those of a safetensors file in this dtype."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # keep the output to the answers
    facts = read_model(path, trust_remote_code=False)
    if weights is not None:
        model = build_model(facts, dtype=getattr(torch, dtype), within=no_init_weights())
        load_weights(model, safetensors.torch.load_file(weights))
        return Speaker(model, facts, seed=seed)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DataError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    return Speaker(model.eval(), facts, seed=seed)


class Speaker:
    def __init__(self, model: transformers.PreTrainedModel, facts: ModelFacts, *, seed: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"  # no GPU has run this
        self._model: Any = model.to(device)  # type: ignore[arg-type]  # a wrapper that hides nn.Module's own
        self._facts = facts
        self._generator = torch.Generator(device=device).manual_seed(seed)

    @property
    def has_template(self) -> bool:
        return bool(self._facts.tokenizer.chat_template)

    def read(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokenize a prompt as in training: text as it is, messages through the chat template. Only its date, if it
        writes one, is today's, as for whoever uses the model."""
        tokenizer: Any = self._facts.tokenizer
        if isinstance(prompt, str):
            return encode_prompts(tokenizer, [prompt])[0]
        try:
            text = render(tokenizer, prompt, date=date.today().isoformat())
        except TEMPLATE_ERRORS as error:
            raise DataError(f"the tokenizer's chat template rejects the messages: {error}") from error
        return encode(tokenizer, [text])[0]  # the template added the special tokens

    def speak(self, prompt_ids: Sequence[int], sampling: schema.Sampling, answer: Answer) -> Iterator[str]:
        """Yield the pieces of the answer's text and append to `answer`. DataError if the prompt leaves no room."""
        room = self._room(prompt_ids, sampling)
        given, cache = list(prompt_ids), None
        while answer.finish_reason is None:
            logits, cache = self._forward(given, cache)
            token_id = self._choose(logits, prompt_ids, sampling, answer)
            answer.token_ids.append(token_id)
            if token_id in self._facts.stop_ids:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) >= room:
                answer.finish_reason = "length"
            # A model without a KV cache reads everything again for each token.
            given = [token_id] if cache is not None else [*prompt_ids, *answer.token_ids]
            yield self._new_text(answer)

    def _room(self, prompt_ids: Sequence[int], sampling: schema.Sampling) -> int:
        known = self._facts.max_positions
        if not prompt_ids:
            raise DataError("the prompt has no tokens")
        if known is not None and len(prompt_ids) >= known:
            raise DataError(f"{len(prompt_ids)} tokens leave no room for an answer: the model has {known} positions")
        return sampling.max_tokens if known is None else min(sampling.max_tokens, known - len(prompt_ids))

    @torch.inference_mode()
    def _forward(self, token_ids: list[int], cache: Any) -> tuple[torch.Tensor, Any]:  # [1, V]
        ids = torch.tensor([token_ids], device=self._generator.device)
        more = {} if cache is None else {"past_key_values": cache}
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **more)
        return output.logits[:, -1], getattr(output, "past_key_values", None)

    @torch.inference_mode()
    def _choose(
        self, logits: torch.Tensor, prompt_ids: Sequence[int], sampling: schema.Sampling, answer: Answer
    ) -> int:
        state = RowState(sampling=sampling, num_tokens=len(answer.token_ids), seen=[*prompt_ids, *answer.token_ids])
        logprobs = processed_logprobs(logits, [state], self._facts.stop_ids)
        return int(choose(logprobs, [state], self._generator))

    def _new_text(self, answer: Answer) -> str:
        """Return the text that the last token completed; one character may take several tokens."""
        text = self._facts.decode(answer.token_ids)
        if text.endswith(_INCOMPLETE) and answer.finish_reason is None:
            return ""
        piece, answer.text = text[len(answer.text) :], text
        return piece
