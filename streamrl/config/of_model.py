"""Checks settings against the model: its positions, and its special tokens. Learner and workers each read the model by
themselves, and ask here whether the run's sequences fit it, and whether its stop strings can end a response.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from streamrl.config.engine_args import longest_response
from streamrl.config.schema import Config
from streamrl.errors import ConfigError

NAME_AN_END = "name the token you need in eos_token_id of the model's generation_config.json"


class _Tokenizer(Protocol):
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...


def longest_sequence(config: Config, path: str, positions: int | None) -> int:
    """Return the length in tokens of the longest sequence that a ticket can ask for, its prompt included. ConfigError
    if workers could not generate it with the model at `path`; `positions`: None if its configuration does not say."""
    key, response = longest_response(config)
    longest = config.data.max_prompt_tokens + response
    if positions is not None and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens and {key} together allow sequences of {longest} tokens; the model at {path!r} has "
            f"only {positions} positions"
        )
    return longest


def special_tokens(tokenizer: _Tokenizer) -> dict[int, str]:
    """Return all tokens that texts are decoded without, including those without a named role in the tokenizer."""
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def unseen_in(stop: str, tokenizer: _Tokenizer, ends: Collection[int]) -> str | None:
    """Return the special token for which this stop string matches no text; None if it may match, or holds one of the
    model's end tokens, at which a response ends anyway."""
    held = {token_id: token for token_id, token in special_tokens(tokenizer).items() if token in stop}
    return None if held.keys() & set(ends) else next(iter(held.values()), None)


def refuse_unseen_stops(config: Config, tokenizer: _Tokenizer, ends: Collection[int]) -> None:
    """ConfigError for a stop string at which no response would end."""
    for section, sampling in (("sampling", config.sampling), ("validation.sampling", config.validation.sampling)):
        for stop in sampling.stop:
            if (token := unseen_in(stop, tokenizer, ends)) is not None:
                raise ConfigError(
                    f"{section}.stop = {stop!r}: {token!r} is a special token, which texts are decoded without, so no "
                    f"response would end there; remove it, and {NAME_AN_END}"
                )
