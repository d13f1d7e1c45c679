"""What a worker needs to know of a model besides its weights: tokenizer, end tokens, sizes, fingerprint. And how it is
found: whether its operator permits it, and whether it is the run's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.config.of_model import special_tokens
from streamrl.encoding import FROM_FILES, refuse_lone_tekken
from streamrl.errors import ConfigError, DataError
from streamrl.permissions import Permissions, allowed_model
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.wire.fingerprint import identity_of
from streamrl.telemetry.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "streamrl-answer"  # text that no template contains


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    path: str  # folder or hub name
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    vocab_size: int  # of the model's output
    max_positions: int | None  # longest supported sequence; None if the configuration does not state it
    fingerprint: str
    trust_remote_code: bool  # run code from the model's folder

    def decode(self, token_ids: list[int]) -> str:
        """Decode without special tokens."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "one sequence is one text"
        return text

    def decode_marked(self, token_ids: list[int]) -> str | None:
        """Decode with special tokens, without a trailing end token; None if there are no special tokens in between."""
        within = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        if special_tokens(self.tokenizer).keys().isdisjoint(within):
            return None
        return str(self.tokenizer.decode(within, skip_special_tokens=False))

    def without_special(self, text: str) -> str:
        for token in special_tokens(self.tokenizer).values():
            text = text.replace(token, "")
        return text

    def ends(self) -> Mapping[int, str]:
        """Return for each end token its text, with what the template writes after it if that is how it ends an answer.

        Reward models read it behind a chat's answer. They were trained on whole messages, as the chat template writes
        them to the end, and most score a text by its last token; a completion has neither its end token nor what
        follows it.
        """
        decode = self.tokenizer.decode
        texts = {token_id: str(decode([token_id], skip_special_tokens=False)) for token_id in self.stop_ids}
        after = self.after_an_answer()
        return {token_id: after if after.startswith(text) else text for token_id, text in texts.items()}

    def after_an_answer(self) -> str:
        """Return what the chat template writes from an answer's end on; empty if that cannot be told."""
        from streamrl.chat_templates import TEMPLATE_ERRORS  # needs transformers

        if not self.tokenizer.chat_template:
            return ""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False)).partition(_MARK)[2]
        except TEMPLATE_ERRORS:
            return ""


async def find_model(
    config: schema.Config, info: RunInfo, *, override: str | None, permissions: Permissions, progress: Progress
) -> ModelFacts:
    """Read the model's facts. `override`: folder or hub name that replaces the run's. ConfigError if they differ."""
    path = allowed_model(config.model.path, override=override, permissions=permissions)
    progress.starting("load the tokenizer")
    model = await asyncio.to_thread(read_model, path, trust_remote_code=permissions.trust_remote_code)
    if model.fingerprint != info.fingerprint:
        raise ConfigError(
            f"the model at {model.path!r} has another tokenizer, end token or vocabulary size than the run's "
            f"({model.fingerprint}, the run has {info.fingerprint}): give this worker the run's model with --model"
        )
    return model


def read_model(path: str, *, trust_remote_code: bool) -> ModelFacts:
    """Read configuration and tokenizer, without weights. DataError if they are missing or not a language model's."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **FROM_FILES)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"model {path!r} cannot be used: {str(error).splitlines()[0]}") from error
    refuse_lone_tekken(tokenizer, path)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # optional
        generation = None
    ends, fingerprint = identity_of(tokenizer, config, generation, model=f"model {path!r}")
    return ModelFacts(
        path=path,
        tokenizer=tokenizer,
        stop_ids=ends,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        fingerprint=fingerprint,
        trust_remote_code=trust_remote_code,
    )
