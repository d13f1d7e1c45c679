"""Both sides must mean the same by a token id."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from streamrl.errors import DataError
from streamrl.protocol.wire.fingerprint import fingerprint, identity_of, stop_ids

VOCAB = {"a": 0, "b": 1, "<eos>": 2}


@dataclass
class Tokenizer:
    eos_token_id: int | None = 2
    all_special_tokens: list[str] = field(default_factory=lambda: ["<eos>"])
    vocab: dict[str, int] = field(default_factory=lambda: VOCAB)

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_the_fingerprint_does_not_depend_on_the_order_of_the_vocabulary() -> None:
    backwards = dict(reversed(VOCAB.items()))
    assert fingerprint(vocab=VOCAB, stop_ids=[2], vocab_size=8) == fingerprint(
        vocab=backwards, stop_ids=[2], vocab_size=8
    )


@pytest.mark.parametrize(
    ("vocab", "ends", "size"),
    [
        ({"a": 1, "b": 0, "<eos>": 2}, [2], 8),
        ({"a": 0, "b1": 1, "<eos>": 2}, [2], 8),
        (VOCAB, [1, 2], 8),
        (VOCAB, [2], 16),
    ],
)
def test_whatever_changes_the_meaning_of_ids_changes_the_fingerprint(
    vocab: dict[str, int], ends: list[int], size: int
) -> None:
    changed = fingerprint(vocab=vocab, stop_ids=ends, vocab_size=size)
    assert changed != fingerprint(vocab=VOCAB, stop_ids=[2], vocab_size=8)


def test_all_end_tokens_count_wherever_they_are_said() -> None:
    assert stop_ids(tokenizer_eos=7, generation_eos=[9, 7]) == (7, 9)
    assert stop_ids(tokenizer_eos=7, generation_eos=None) == (7,)
    assert stop_ids(tokenizer_eos=None, generation_eos=3) == (3,)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (SimpleNamespace(vocab_size=8), None, (2,)),
        (SimpleNamespace(vocab_size=8, eos_token_id=7), None, (2, 7)),
        (SimpleNamespace(vocab_size=8, eos_token_id=7), SimpleNamespace(eos_token_id=[5, 6]), (2, 5, 6)),
    ],
)
def test_without_a_generation_config_the_model_s_own_end_tokens_count(
    config: object, generation: object, ends: tuple[int, ...]
) -> None:
    expected = ends, fingerprint(vocab=VOCAB, stop_ids=ends, vocab_size=8)
    assert identity_of(Tokenizer(), config, generation, model="model 'm'") == expected


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        (Tokenizer(vocab={"<eos>": 2}), "model 'm' has no tokenizer"),
        (Tokenizer(eos_token_id=None), "model 'm' has no end token"),
        (Tokenizer(eos_token_id=8), "model 'm' has the end token 8, but only 8 outputs: .* correct eos_token"),
    ],
)
def test_a_model_without_a_tokenizer_or_an_end_token_is_the_user_s_mistake(tokenizer: Tokenizer, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        identity_of(tokenizer, SimpleNamespace(vocab_size=8), None, model="model 'm'")
