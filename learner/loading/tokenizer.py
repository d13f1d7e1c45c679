"""A model's tokenizer, and what the learner and every worker must agree on about it.

Reads no weights. Blocks on the disk, and on the hub if the model is not here yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from streamrl.encoding import FROM_FILES, refuse_lone_tekken
from streamrl.learner.loading.build import read_config, usable
from streamrl.protocol.wire.fingerprint import identity_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """What the learner's model and tokenizer must have in common with every worker's."""

    tokenizer: transformers.PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # tokens that end a response, banned before `min_tokens`
    vocabulary: int  # size of the model's output
    fingerprint: str


def read_tokenizer_info(path: str) -> TokenizerInfo:
    """Read tokenizer and configuration, no weights."""
    config = read_config(path)
    with usable(path, "give a tokenizer", (OSError, ValueError, KeyError)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **FROM_FILES)
    refuse_lone_tekken(tokenizer, path)
    try:
        generation = transformers.GenerationConfig.from_pretrained(path)
    except OSError:  # optional
        generation = None
    ends, fingerprint = identity_of(tokenizer, config, generation, model=f"model.path {path!r}")
    return TokenizerInfo(tokenizer=tokenizer, end_ids=ends, vocabulary=config.vocab_size, fingerprint=fingerprint)
