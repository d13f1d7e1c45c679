"""What all sides agree on before they read each other's messages: what a ticket is for, how large a message may be, and
the fingerprint of model and tokenizer. Small, so that who counts tickets or checks settings loads nothing else.

Settings and prompts are held to the limits before a run begins: what nobody could read is never asked for. A worker
compares its own fingerprint with the run's before it takes a ticket, and every group carries it, so that tokens of
another tokenizer or another end token are never trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("train", "eval")


MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 20  # of a prompt, and of a sample
MAX_SAMPLES = 1024  # of a ticket, and of the group that answers it
MAX_REWARD_SOURCES = 32
# A ticket's prompt and fields, of four bytes a character, its token ids, of four bytes each, and what is small.
MAX_TICKET_BYTES = 4 * (2 * MAX_TEXT_CHARS + MAX_TOKENS) + (1 << 20)

_COLUMN_BYTES = 4 << 20  # of a group, besides tokens: rewards, versions and mask runs are some KB a sample
_BYTES_PER_TOKEN = 8  # its id and its log-prob
MAX_GROUP_TOKENS = (MAX_MESSAGE_BYTES - _COLUMN_BYTES) // _BYTES_PER_TOKEN  # of its prompt and its samples


def stop_ids(*, tokenizer_eos: int | None, generation_eos: int | Iterable[int] | None) -> tuple[int, ...]:
    """The tokens that end a response, sorted: the tokenizer's end token and those of the generation configuration.

    Exactly these have probability zero before `min_tokens`, in the engine as in the learner.
    """
    further = (generation_eos,) if isinstance(generation_eos, int) else tuple(generation_eos or ())
    return tuple(sorted({*further, *(() if tokenizer_eos is None else (tokenizer_eos,))}))


def fingerprint(*, vocab: Mapping[str, int], stop_ids: Iterable[int], vocab_size: int) -> str:
    """16 hex digits of the tokenizer's words, the end tokens, and the (perhaps padded) size of the model's output."""
    digest = hashlib.sha256()
    digest.update(f"{vocab_size};{sorted(stop_ids)};".encode())
    for token, token_id in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        # Lengths keep two vocabularies apart whose concatenations are equal.
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()[:16]
