"""Packed rows: everything in its place, and no sequence sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.loading.build import load_model
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape
from streamrl.learner.packing.pack import empty_micro_batch, pack
from streamrl.protocol.wire.branches import Branch, rows_of
from tests.tiny_models import Architecture, make_model, response_logprobs

SHARED = Shape(hidden_size=64, share_prompts=True)
ALONE = Shape(hidden_size=64, share_prompts=False)
FLAT = Shape(hidden_size=64, share_prompts=True, padded=False)


def piece(sample: int, num_prompt: int, num_response: int, *, group: int | None = None) -> Piece:
    """Of its own group unless one is given, which then decides the prompt."""
    group = sample if group is None else group
    rng, of_group = np.random.default_rng(sample), np.random.default_rng(1000 + group)
    return Piece(
        sample=sample,
        group=group,
        prompt_ids=of_group.integers(3, 40, num_prompt, dtype=np.int32),
        token_ids=rng.integers(3, 40, num_response, dtype=np.int32),
        behaviour_logprobs=rng.normal(size=num_response).astype(np.float32),
        mask=np.ones(num_response, dtype=np.bool_),
    )


def make_policy(folder: Path) -> Policy:
    return Policy(load_model(str(folder)), head=Head(), min_tokens=0, dtype=torch.float32)


# Groups: the length of the prompt, and those of the responses to it.
batches = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(groups=batches, max_tokens=st.integers(1, 300), shape=st.sampled_from([SHARED, ALONE, FLAT]))
def test_every_token_is_trained_exactly_once_and_sees_its_own_past_alone(
    groups: list[tuple[int, list[int]]], max_tokens: int, shape: Shape
) -> None:
    lengths = [(g, p, r) for g, (p, responses) in enumerate(groups) for r in responses]
    pieces = [piece(i, p, r, group=g) for i, (g, p, r) in enumerate(lengths)]
    seen: dict[int, list[int]] = {i: [] for i in range(len(pieces))}
    for batch in pack(pieces, max_tokens=max_tokens, shape=shape):
        rows, length = batch.input_ids.shape
        assert rows == 1 or rows * length <= max_tokens
        visible = batch.attention_mask()[:, 0]
        assert visible.any(-1).all(), "every cell sees something, at least itself"
        assert shape.padded or torch.equal(told_by_starts(batch), visible[0])
        for index, target, position, sample in zip(
            batch.index.tolist(), batch.targets.tolist(), batch.position.tolist(), batch.sample.tolist(), strict=True
        ):
            row, column = divmod(index, length)
            whole = [*pieces[sample].prompt_ids, *pieces[sample].token_ids]
            place = len(pieces[sample].prompt_ids) + position
            assert batch.input_ids[row, visible[row, column]].tolist() == whole[:place]
            assert batch.position_ids[row, visible[row, column]].tolist() == list(range(place))
            assert target == whole[place]
            seen[sample].append(position)
    assert all(sorted(seen[i]) == list(range(r)) for i, (_, _, r) in enumerate(lengths))


def told_by_starts(batch: MicroBatch) -> torch.Tensor:
    """[length, length] what a kernel without a mask lets each cell see."""
    cells = torch.arange(batch.input_ids.numel())
    of = torch.searchsorted(batch.starts, cells, right=True)
    seen = (of[:, None] == of) & (cells[:, None] >= cells)
    assert batch.longest == batch.starts.diff().max()
    if (told := batch.prefixes) is not None:
        lengths = told.of_responses.diff(), told.of_prompts.diff()
        assert (told.most_responses, told.longest_prompt) == tuple(int(each.max()) for each in lengths)
        for responses, prompt in zip(
            told.responses.split(lengths[0].tolist()), told.prompts.split(lengths[1].tolist()), strict=True
        ):
            seen[responses[:, None], prompt] = True
    return seen


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int], list[Branch]]:
    """(tokens of the prompt, those of each row's own, branches)"""
    num_prompt, own = draw(st.integers(1, 5)), draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    own[0] -= draw(st.integers(0, 1)) if len(own) > 1 else 0  # the first row of a sample with branches may be empty
    branches: list[Branch] = []
    lengths = [num_prompt + own[0]]
    for at in range(1, len(own)):
        row = draw(st.integers(0, at - 1))
        keep = draw(st.integers(0, lengths[row]))
        branches.append(Branch(start=sum(own[:at]), row=row, keep=keep))
        lengths.append(keep + own[at])
    return num_prompt, own, branches


ROWS = Shape(hidden_size=64, share_prompts=False, alone=True)


def branched(sample: int, num_prompt: int, own: list[int], branches: list[Branch], *, group: int) -> Piece:
    """What stands at the begin of a sequence cannot have been sampled."""
    whole = piece(sample, num_prompt, sum(own), group=group)
    mask = np.random.default_rng(sample).random(sum(own)) < 0.7
    mask[[branch.start for branch in branches if branch.keep == 0]] = False
    return replace(whole, mask=mask, branches=tuple(branches))


@settings(max_examples=100)
@given(
    trees=st.lists(trees(), min_size=1, max_size=6),
    max_tokens=st.integers(1, 200),
    shape=st.sampled_from([SHARED, ALONE, ROWS, FLAT]),
)
def test_of_branches_every_token_is_trained_once_and_sees_its_own_row_alone(
    trees: list[tuple[int, list[int], list[Branch]]], max_tokens: int, shape: Shape
) -> None:
    num_prompt = trees[0][0]
    trees = [(n, own, kept) for n, own, kept in trees if n == num_prompt]  # all of one group
    pieces = [branched(i, n, own, kept, group=0) for i, (n, own, kept) in enumerate(trees)]
    seen: dict[int, list[int]] = {i: [] for i in range(len(pieces))}
    given = [piece for piece in pieces if piece.mask.any()]  # as the learner does it
    for batch in pack(given, max_tokens=max_tokens, shape=shape):
        length = batch.input_ids.shape[1]
        visible = batch.attention_mask()[:, 0]
        assert shape.padded or torch.equal(told_by_starts(batch), visible[0])
        for index, target, position, sample in zip(
            batch.index.tolist(), batch.targets.tolist(), batch.position.tolist(), batch.sample.tolist(), strict=True
        ):
            own = pieces[sample]
            whole = [*own.prompt_ids, *own.token_ids]
            rows = rows_of(num_prompt, len(own.token_ids), own.branches)
            starts = [0, *(branch.start for branch in own.branches)]
            sequence = rows[max(r for r, start in enumerate(starts) if start <= position)].tolist()
            at = sequence.index(num_prompt + position)
            row, column = divmod(index, length)
            assert batch.input_ids[row, visible[row, column]].tolist() == [whole[place] for place in sequence[:at]]
            assert batch.position_ids[row, visible[row, column]].tolist() == list(range(at))
            assert target == whole[num_prompt + position]
            seen[sample].append(position)
        assert all(len(found) in (0, own.mask.sum()) for found, own in zip(seen.values(), pieces, strict=True))
    assert all(sorted(seen[i]) == np.flatnonzero(own.mask).tolist() for i, own in enumerate(pieces))


def test_branches_share_what_they_begin_with() -> None:
    kept = [Branch(start=10 * at, row=at - 1, keep=20 + 8 * at) for at in range(1, 9)]
    whole = [branched(0, 20, [10] * 9, kept, group=0)]
    assert cells(pack(whole, max_tokens=4096, shape=SHARED)) == 20 + 9 * 10 - 9
    assert cells(pack(whole, max_tokens=4096, shape=ALONE)) == 20 + 9 * 10 - 9 + sum(branch.keep for branch in kept)


@pytest.mark.parametrize("shape", [SHARED, ALONE, ROWS], ids=["shared", "packed", "rows"])
def test_log_probs_of_branches_equal_those_of_each_row_alone(tmp_path: Path, shape: Shape) -> None:
    folder = make_model(tmp_path / "model")
    policy = make_policy(folder).eval()
    policy.shape = shape
    kept = [Branch(start=6, row=0, keep=7), Branch(start=11, row=1, keep=9), Branch(start=15, row=0, keep=0)]
    pieces = [branched(i, 4, [6, 5, 4, 3], kept, group=0) for i in range(3)]
    num_compared = 0
    with torch.no_grad():
        for batch in pack(pieces, max_tokens=96, shape=shape):
            logp = policy(batch).logp
            for i, position, value in zip(batch.sample.tolist(), batch.position.tolist(), logp, strict=True):
                whole = np.concatenate([pieces[i].prompt_ids, pieces[i].token_ids])
                row = next(row for row in rows_of(4, 18, pieces[i].branches) if 4 + position in row[1:])
                sequence = whole[row].tolist()
                at = row.tolist().index(4 + position)
                truth = response_logprobs(folder, sequence[:1], sequence[1:])[at - 1]
                torch.testing.assert_close(value, truth, atol=1e-5, rtol=0)
                num_compared += 1
    assert num_compared == sum(int(own.mask.sum()) for own in pieces)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_is_counted_in_the_sequence_and_not_in_the_row(window: int) -> None:
    [batch] = pack([piece(i, 4, 6, group=0) for i in range(3)], max_tokens=64, shape=SHARED)
    whole, near = batch.attention_mask()[0, 0], batch.attention_mask(window)[0, 0]
    positions = batch.position_ids[0]
    for at in range(len(positions)):
        last = [seen for seen in positions[whole[at]].tolist() if seen > int(positions[at]) - window]
        assert positions[near[at]].tolist() == last


def test_masked_tokens_are_read_but_not_trained() -> None:
    whole = piece(0, 3, 4)
    mask = np.array([True, False, False, True])
    [batch] = pack([replace(whole, mask=mask)], max_tokens=64, shape=SHARED)
    assert batch.position.tolist() == [0, 3]
    assert batch.input_ids[0, 3:6].tolist() == whole.token_ids[:3].tolist()


def test_long_tailed_lengths_fill_their_rows_well() -> None:
    rng = np.random.default_rng(0)
    tail = np.clip(rng.lognormal(4, 1, 400), 4, 1000).astype(int)
    packed = pack([piece(i, 10, int(n)) for i, n in enumerate(tail)], max_tokens=8192, shape=ALONE)
    assert sum(9 + tail) / cells(packed) > 0.9


def test_sharing_prompts_leaves_fewer_cells_than_there_are_tokens() -> None:
    pieces = [piece(i, 20, 10, group=i // 8) for i in range(64)]
    assert cells(pack(pieces, max_tokens=8192, shape=SHARED)) < 0.6 * sum(p.num_tokens for p in pieces)


def test_a_prompt_without_a_mask_is_laid_once_for_its_group_if_rows_are_long_enough() -> None:
    pieces = [piece(i, 600, 40, group=i // 8) for i in range(32)]
    assert cells(pack(pieces, max_tokens=1000, shape=FLAT)) == 4 * 600 + 32 * 39
    assert cells(pack(pieces, max_tokens=700, shape=FLAT)) == 16 * 600 + 32 * 39, "two responses fit beside it"
    assert cells(pack(pieces, max_tokens=1000, shape=replace(FLAT, share_prompts=False))) == 32 * 639


def test_rows_stay_short_where_attention_is_dear() -> None:
    pieces = [piece(i, 2, 500, group=i // 8) for i in range(16)]
    [batch] = pack(pieces, max_tokens=1 << 20, shape=SHARED)
    assert batch.input_ids.shape[1] == 501


def test_packing_does_not_depend_on_the_order_of_samples() -> None:
    pieces = [piece(i, 3, 1 + i % 7, group=i // 3) for i in range(20)]
    packed, reversed_ = (pack(order, max_tokens=64, shape=SHARED) for order in (pieces, pieces[::-1]))
    assert [b.input_ids.tolist() for b in packed] == [b.input_ids.tolist() for b in reversed_]


@pytest.mark.parametrize("shape", [SHARED, ALONE], ids=["prompts shared", "prompts repeated"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_packed_log_probs_equal_those_of_each_sequence_alone(
    tmp_path: Path, architecture: Architecture, shape: Shape
) -> None:
    folder = make_model(tmp_path / "model", architecture=architecture)
    policy = make_policy(folder).eval()
    policy.shape = shape
    pieces = [piece(i, 2 + i // 4, 1 + (5 * i) % 11, group=i // 4) for i in range(16)]
    with torch.no_grad():
        for batch in pack(pieces, max_tokens=96, shape=shape):
            logp = policy(batch).logp
            for i in batch.sample.unique().tolist():
                truth = response_logprobs(folder, pieces[i].prompt_ids.tolist(), pieces[i].token_ids.tolist())
                torch.testing.assert_close(logp[batch.sample == i], truth, atol=1e-5, rtol=0)


def test_a_row_for_each_sequence_is_padded_little() -> None:
    pieces = [piece(i, 3, 1 + (7 * i) % 40, group=i // 3) for i in range(30)]
    batches = pack(pieces, max_tokens=100, shape=Shape(hidden_size=64, share_prompts=False, alone=True))
    assert sum(len(batch.starts) - 1 >= len(batch.input_ids) for batch in batches) == len(batches)
    assert sum(len(batch.input_ids) for batch in batches) == len(pieces)
    assert all(batch.input_ids.numel() <= 100 for batch in batches)
    for row, positions in ((row, p) for b in batches for row, p in zip(b.input_ids, b.position_ids, strict=True)):
        assert positions[row > 0].tolist() == list(range(int((row > 0).sum()))), "one sequence, from its begin"
    assert cells(batches) < 1.3 * sum(p.num_tokens for p in pieces)


def test_rows_whose_logits_are_held_whole_are_few_at_a_time() -> None:
    pieces = [piece(i, 3, 18) for i in range(9)]
    bounded = Shape(hidden_size=64, share_prompts=False, alone=True, max_cells=45)
    assert [len(batch.input_ids) for batch in pack(pieces, max_tokens=1000, shape=bounded)] == [2, 2, 2, 2, 1]


def test_an_empty_micro_batch_passes_through_the_model_and_changes_nothing(tmp_path: Path) -> None:
    policy = make_policy(make_model(tmp_path / "model"))
    policy(empty_micro_batch(policy.shape)).logp.sum().backward()
    gradients = [p.grad for p in policy.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_a_micro_batch_knows_the_log_probs_of_its_tokens() -> None:
    pieces = [piece(i, 2, 3 + i, group=i // 2) for i in range(5)]
    [batch] = pack(pieces, max_tokens=1000, shape=SHARED)
    for sample, position, behaviour_logprobs in zip(
        batch.sample, batch.position, batch.behaviour_logprobs, strict=True
    ):
        assert float(behaviour_logprobs) == float(pieces[int(sample)].behaviour_logprobs[int(position)])


def cells(packed: Sequence[MicroBatch]) -> int:
    return sum(batch.input_ids.numel() for batch in packed)
