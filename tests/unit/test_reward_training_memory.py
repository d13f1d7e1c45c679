"""The memory of reward training: batches go through the model in pieces, which changes no gradient."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.workers.reward_server.model import RewardModel, Row
from streamrl.workers.reward_server.train import (
    _PIECE_TOKENS,
    TrainSettings,
    _add_gradients,
    _Encoded,
    _mean_loss,
    _rewards,
    read_pairs,
    train,
)
from tests.tiny_models import make_model
from tests.tiny_rewards import make_reward_model


class Recording(RewardModel):
    """Gives float64 outputs of float64 weights, and keeps the lengths of each forward pass's rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model.double()
        self.passes: list[list[int]] = []

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.passes.append([len(row) for row in rows])
        width, pad = max(map(len, rows)), self.model.config.get_text_config().pad_token_id
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits


def recording(folder: Path, *, num_labels: int = 1) -> Recording:
    make_reward_model(folder, num_labels=num_labels)
    return Recording.load(schema.RewardServer(model=str(folder)), new_head=num_labels)


def examples_of(lengths: Sequence[tuple[int, ...]], *, num_scores: int = 0) -> list[_Encoded]:
    order = random.Random(1)
    return [
        _Encoded(
            rows=tuple(tuple(order.choices(range(3, 20), k=length)) for length in rows),
            scores=tuple(order.random() for _ in range(num_scores)),
        )
        for rows in lengths
    ]


def random_lengths(count: int, *, num_rows: int, longest: int) -> list[tuple[int, ...]]:
    order = random.Random(0)
    return [tuple(order.randint(1, longest) for _ in range(num_rows)) for _ in range(count)]


def gradients(scorer: RewardModel) -> list[torch.Tensor]:
    found = [weight.grad.clone() for weight in scorer.model.parameters() if weight.grad is not None]
    scorer.model.zero_grad()
    return found


def padded(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


@pytest.mark.parametrize(("num_rows", "num_scores"), [(2, 0), (1, 1), (1, 3)])
def test_the_pieces_of_a_batch_give_the_gradient_of_one_pass(tmp_path: Path, num_rows: int, num_scores: int) -> None:
    scorer = recording(tmp_path / "rm", num_labels=max(1, num_scores))
    longest = 2 * _PIECE_TOKENS // (7 * num_rows)  # several pieces, of different numbers of examples
    batch = examples_of(random_lengths(15, num_rows=num_rows, longest=longest), num_scores=num_scores)

    whole = _mean_loss(scorer, batch)
    whole.backward()
    expected = gradients(scorer)
    scorer.passes.clear()
    loss = _add_gradients(scorer, batch)

    assert len({len(rows) for rows in scorer.passes}) > 1
    assert loss == pytest.approx(whole.item(), rel=1e-7)
    assert any(gradient.abs().max() > 0 for gradient in expected)
    # The model's norms compute in float32 whatever its weights are.
    torch.testing.assert_close(gradients(scorer), expected, rtol=1e-6, atol=1e-9)


def test_no_pass_of_a_batch_of_long_pairs_exceeds_the_bound_or_splits_a_pair(tmp_path: Path) -> None:
    scorer = recording(tmp_path / "rm")
    batch = examples_of(random_lengths(32, num_rows=2, longest=700))
    _add_gradients(scorer, batch)
    assert max(map(padded, scorer.passes)) <= _PIECE_TOKENS
    pairs = [tuple(rows[at : at + 2]) for rows in scorer.passes for at in range(0, len(rows), 2)]
    assert sorted(pairs) == sorted(tuple(map(len, example.rows)) for example in batch)


def test_a_pair_beyond_the_bound_goes_alone(tmp_path: Path) -> None:
    scorer = recording(tmp_path / "rm")
    _add_gradients(scorer, examples_of([(5, 6), (3, _PIECE_TOKENS // 2 + 1), (7, 8)]))
    assert scorer.passes == [[5, 6, 7, 8], [3, _PIECE_TOKENS // 2 + 1]]


def test_held_out_texts_are_scored_in_order_and_within_the_bound(tmp_path: Path) -> None:
    scorer = recording(tmp_path / "rm")
    held_out = examples_of(random_lengths(20, num_rows=2, longest=700))
    scorer.model.eval()
    rewards = _rewards(scorer, held_out)
    assert max(map(padded, scorer.passes)) <= _PIECE_TOKENS
    with torch.no_grad():
        single = [scorer.forward([row]).item() for example in held_out for row in example.rows]
    assert rewards == pytest.approx(single, rel=1e-6, abs=1e-9)


def test_memory_that_runs_out_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")

    monkeypatch.setattr(RewardModel, "forward", forward)
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = TrainSettings(model=str(make_model(tmp_path / "lm")), output=tmp_path / "rm", max_tokens=512)
    with pytest.raises(ResourceError, match=r"memory is too small .* 512 tokens: lower --max-tokens") as caught:
        train(read_pairs(tmp_path / "pairs.jsonl"), settings, lambda line: None)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
