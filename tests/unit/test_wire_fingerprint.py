"""Both sides must mean the same by a token id."""

from __future__ import annotations

import pytest

from streamrl.protocol.wire.fingerprint import fingerprint, stop_ids

VOCAB = {"a": 0, "b": 1, "<eos>": 2}


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
