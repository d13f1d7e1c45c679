"""What a worker needs to know of a model besides its weights: tokenizer, end tokens, sizes, fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.config.of_model import special_tokens
from streamrl.encoding import FROM_FILES, refuse_lone_tekken
from streamrl.errors import DataError
from streamrl.protocol.wire.fingerprint import fingerprint, stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        generation_eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a generation config is optional
        generation_eos = getattr(config, "eos_token_id", None)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # transformers returns such a tokenizer for a folder without tokenizer files; it encodes every text to nothing.
        raise DataError(f"model {path!r} has no tokenizer: its folder lacks tokenizer.json")
    ends = stop_ids(tokenizer_eos=tokenizer.eos_token_id, generation_eos=generation_eos)
    if not ends:
        raise DataError(f"model {path!r} has no end token: set eos_token in its tokenizer_config.json")
    return ModelFacts(
        path=path,
        tokenizer=tokenizer,
        stop_ids=ends,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        fingerprint=fingerprint(vocab=tokenizer.get_vocab(), stop_ids=ends, vocab_size=config.vocab_size),
        trust_remote_code=trust_remote_code,
    )
