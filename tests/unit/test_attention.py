"""Attention told where sequences begin, against attention under a mask."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.loading.load import load_policy
from streamrl.learner.model.policy import Policy
from streamrl.learner.packing.attention import MASKED, VARLEN, attend, choose, each_by_itself
from streamrl.learner.packing.micro_batches import Shape
from streamrl.learner.packing.pack import pack
from streamrl.learner.packing.prefixes import Spans, attend_twice, each_with_its_prompt, prefixes_of
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.tiny_models import make_model
from tests.unit.test_packing import piece

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def policy_with(folder: Path, attention: str, *, checkpointing: bool = False) -> Policy:
    model = schema.Model.model_validate(
        {"path": str(folder), "dtype": "float32", "attention": attention, "gradient_checkpointing": checkpointing}
    )
    return load_policy(learner_config(folder, model=model), ALONE, (1,))


def learnt(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(log-probs in the order of samples, gradients of a sum that weighs each differently)"""
    pieces = [piece(i, 2 + i // 4, 1 + (5 * i) % 11, group=i // 4) for i in range(16)]
    found: list[tuple[int, int, float]] = []
    for batch in pack(pieces, max_tokens=60, shape=policy.shape):
        logp = policy(batch).logp
        (logp * (1 + batch.sample % 3) * (1 + batch.position)).sum().backward()
        found += zip(batch.sample.tolist(), batch.position.tolist(), logp.tolist(), strict=True)
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return torch.tensor([logp for *_, logp in sorted(found)]), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sequences_told_apart_by_where_they_begin_learn_what_masked_ones_learn(
    tmp_path: Path, checkpointing: bool
) -> None:
    folder = make_model(tmp_path / "model", heads=4, kv_heads=2)
    masked, varlen = policy_with(folder, "masked"), policy_with(folder, "varlen", checkpointing=checkpointing)
    assert masked.shape.share_prompts
    assert varlen.shape.share_prompts
    assert not varlen.shape.padded
    torch.testing.assert_close(learnt(varlen), learnt(masked), atol=1e-3, rtol=1e-3)


def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture="llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "sliding_window": 4}))
    windowed, told = policy_with(folder, "masked"), policy_with(folder, "varlen")
    assert not told.shape.share_prompts
    torch.testing.assert_close(learnt(told), learnt(windowed), atol=1e-3, rtol=1e-3)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "sliding_window": None}))
    assert not torch.allclose(learnt(policy_with(folder, "varlen"))[0], learnt(told)[0], atol=1e-2)


def test_a_micro_batch_of_whole_sequences_is_one_row_without_a_hole() -> None:
    pieces = [piece(i, 3, 1 + i % 7, group=i // 3) for i in range(20)]
    batches = pack(pieces, max_tokens=40, shape=Shape(hidden_size=64, share_prompts=False, padded=False))
    assert sum(batch.input_ids.numel() for batch in batches) == sum(p.num_tokens for p in pieces)
    for batch in batches:
        assert len(batch.input_ids) == 1
        assert batch.input_ids.numel() <= 40
        assert batch.starts.tolist() == [*np.flatnonzero(batch.position_ids[0].numpy() == 0), batch.input_ids.numel()]
        assert batch.longest == batch.starts.diff().max()


@pytest.mark.parametrize(
    ("attention", "dtype", "device", "chosen"),
    [
        ("auto", "bfloat16", "cuda", VARLEN),
        ("auto", "float32", "cuda", MASKED),
        ("auto", "bfloat16", "cpu", MASKED),
        ("masked", "bfloat16", "cuda", MASKED),
        ("varlen", "float32", "cpu", VARLEN),
    ],
)
def test_what_is_fastest_is_chosen_unless_told(attention: str, dtype: str, device: str, chosen: str) -> None:
    settings = schema.Model.model_validate({"path": "m", "attention": attention, "dtype": dtype})
    assert choose(settings, torch.device(device)) == chosen


def test_each_sequence_attends_to_itself_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(9, heads, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 2, 9], dtype=torch.int32)
    ours = each_by_itself(query, key, value, starts, 7, scale=0.5, window=3)
    at = torch.arange(9)
    of = (at >= 2).long()
    seen = (of[:, None] == of) & (at[:, None] >= at) & (at[:, None] - at < 3)
    wide = [x.repeat_interleave(4 // x.shape[1], dim=1).transpose(0, 1)[None] for x in (query, key, value)]
    truth = scaled_dot_product_attention(*wide, attn_mask=seen, scale=0.5)[0].transpose(0, 1)
    torch.testing.assert_close(ours, truth)


class Plain:
    """A kernel of plain operations, with the gradients that a flash kernel's backward pass computes."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(query, key, spans, scale)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), self._wide(value, query))
        return out, scores.logsumexp(-1)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        spans: Spans,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = scale or query.shape[-1] ** -0.5
        p = (self._scores(query, key, spans, scale) - logsumexp[..., None]).exp()
        wide_key, wide_value = self._wide(key, query), self._wide(value, query)
        of_scores = torch.einsum("qhd,khd->hqk", grad, wide_value) - (grad * out).sum(-1).T[..., None]
        ds = p * of_scores * scale
        narrow = (key.shape[0], key.shape[1], -1, key.shape[2])
        return (
            torch.einsum("hqk,khd->qhd", ds, wide_key),
            torch.einsum("hqk,qhd->khd", ds, query).view(narrow).sum(2),
            torch.einsum("hqk,qhd->khd", p, grad).view(narrow).sum(2),
        )

    def _scores(self, query: torch.Tensor, key: torch.Tensor, spans: Spans, scale: float | None) -> torch.Tensor:
        of_query, of_key = (
            torch.searchsorted(starts, torch.arange(len(each)), right=True)
            for starts, each in ((spans.queries, query), (spans.keys, key))
        )
        assert int(spans.queries.diff().max()) == spans.most_queries
        assert int(spans.keys.diff().max()) == spans.most_keys
        seen = of_query[:, None] == of_key
        if spans.is_causal:
            seen &= torch.arange(len(query))[:, None] >= torch.arange(len(key))
        scores = torch.einsum("qhd,khd->hqk", query, self._wide(key, query)) * (scale or query.shape[-1] ** -0.5)
        return scores.masked_fill(~seen, -torch.inf)

    def _wide(self, few: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return few.repeat_interleave(query.shape[1] // few.shape[1], dim=1)


@pytest.mark.parametrize(("scale", "at_least", "sequences"), [(None, 1024, 2), (0.7, 4, 5)])
def test_attending_to_the_prompt_apart_gives_the_whole_attention_and_its_gradients(
    scale: float | None, at_least: int, sequences: int
) -> None:
    """Also if a prompt is repeated for parts of the responses to it."""
    pieces = [piece(i, n, 1 + (5 * i) % 9, group=n) for i, n in enumerate([3, 3, 3, 7, 5, 5, 5, 5])]
    [batch] = pack(pieces, max_tokens=1000, shape=Shape(hidden_size=64, share_prompts=True, padded=False))
    prefixes = prefixes_of(batch.starts.numpy(), batch.position_ids[0].numpy(), at_least=at_least)
    assert prefixes is not None
    assert len(prefixes.of_prompts) - 1 == sequences
    generator = torch.Generator().manual_seed(0)
    size = batch.input_ids.numel()
    query, key, value = (
        torch.randn(size, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    upstream = torch.randn(size, 4, 8, generator=generator, dtype=torch.float64)
    where = (query, key, value, batch.starts)
    wide = [x.repeat_interleave(4 // x.shape[1], dim=1).transpose(0, 1)[None] for x in (query, key, value)]
    masked = scaled_dot_product_attention(*wide, attn_mask=batch.attention_mask(), scale=scale)[0].transpose(0, 1)
    for ours in (
        attend_twice(*where, batch.longest, prefixes, scale=scale, kernel=Plain()),
        each_with_its_prompt(*where, prefixes, scale=scale),
    ):
        torch.testing.assert_close(ours, masked)
        gradients = [
            torch.autograd.grad(out, (query, key, value), upstream, retain_graph=True) for out in (ours, masked)
        ]
        torch.testing.assert_close(*gradients)


def test_autocast_narrows_what_rotations_widened() -> None:
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attend(torch.nn.Identity(), query, key, value, None)
    assert out.dtype == torch.bfloat16
    assert out.shape == (1, 5, 2, 8)


def test_attention_that_is_bent_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ConfigError, match=r"model\.attention: .*masked"):
        attend(torch.nn.Identity(), x, x, x, None, softcap=50.0)
