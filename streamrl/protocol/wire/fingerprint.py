"""What a model and its tokenizer must share for tokens to mean the same.

A worker compares the fingerprint of its model and tokenizer with the run's before it takes a ticket. Every group
carries it, so that tokens of another tokenizer or another end token are never trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from streamrl.errors import DataError

# Texts that tokenizers of one vocabulary may split differently: spaces, digits, capitals, other scripts, code, marks.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ttab\nand\n\nlines ",
    "1234567890 3.14159 1,000,000 -17e-3",
    "def f(x):\n    return {x: [y**2 for y in x]}  # ok\n",
    "naïve café, Größe, ελληνικά, русский, 日本語, العربية, 🙂🚀",
    "don't I'LL we've CamelCaseWords snake_case_words https://a.b/c?d=e",
    "52918<12589>",
)


class _Tokenizer(Protocol):
    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...


def identity_of(
    tokenizer: _Tokenizer, config: Any, generation: Any | None, *, model: str
) -> tuple[tuple[int, ...], str]:
    """Return the end tokens and the fingerprint of a model, from what transformers reads of it; DataError, which says
    `model` of it, without a tokenizer or an end token, and where the model cannot generate one of them. `generation`:
    its generation config, which is optional."""
    vocab = tokenizer.get_vocab()
    if set(vocab) <= set(tokenizer.all_special_tokens):
        # transformers returns such a tokenizer for a folder without tokenizer files; it encodes every text to nothing.
        raise DataError(f"{model} has no tokenizer: its folder lacks tokenizer.json")
    generation_eos = getattr(config if generation is None else generation, "eos_token_id", None)
    ends = stop_ids(tokenizer_eos=tokenizer.eos_token_id, generation_eos=generation_eos)
    if not ends:
        raise DataError(
            f"{model} has no end token, so no response could ever end by itself: set eos_token in its "
            "tokenizer_config.json"
        )
    if beyond := [token for token in ends if not 0 <= token < config.vocab_size]:
        raise DataError(
            f"{model} has the end token {beyond[-1]}, but only {config.vocab_size} outputs: model and tokenizer do not "
            "match; correct eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or "
            "config.json"
        )
    return ends, fingerprint(vocab=vocab, stop_ids=ends, vocab_size=config.vocab_size)


def stop_ids(*, tokenizer_eos: int | None, generation_eos: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the tokens that end a response, sorted: the tokenizer's end token and those of the generation config.

    Exactly these have probability zero before `min_tokens`, in the engine and in the learner.
    """
    further = (generation_eos,) if isinstance(generation_eos, int) else tuple(generation_eos or ())
    return tuple(sorted({*further, *(() if tokenizer_eos is None else (tokenizer_eos,))}))


def fingerprint(*, vocab: Mapping[str, int], stop_ids: Iterable[int], vocab_size: int) -> str:
    """Hash the vocabulary, the end tokens, and the (possibly padded) size of the model's output to 16 hex digits."""
    digest = hashlib.sha256()
    digest.update(f"{vocab_size};{sorted(stop_ids)};".encode())
    for token, token_id in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        # Lengths distinguish vocabularies whose concatenations are equal.
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()[:16]
