"""Rows cut into parts for the ranks of a context group: every cell and token once, every head with its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.errors import ConfigError
from streamrl.learner.groups.fetch import Fetched
from streamrl.learner.groups.plan import GroupCheck
from streamrl.learner.loading.build import build_model
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.packing.micro_batches import MicroBatch, Shape
from streamrl.learner.packing.pack import empty_micro_batch, pack
from streamrl.learner.packing.ways import ways_of
from streamrl.learner.parallel.context import ContextSplit, idle, refuse_heads, repeats, share
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.routes import RouteShape
from tests.learner_cases import random_groups
from tests.tiny_families import make_family
from tests.unit.test_packing import batches, piece
from tests.unit.test_wire_routes import random_routes

CPU = torch.device("cpu")


def part(at: int, of: int) -> ContextSplit:
    return ContextSplit(at=at, of=of, group=cast(Any, None))


def shape(at: int, of: int, *, varlen: bool = False) -> Shape:
    return Shape(hidden_size=64, share_prompts=not varlen, padded=not varlen, part=at, parts=of)


def cells_of(batch: MicroBatch) -> torch.Tensor:  # [T, 2] what predicts each token, and the token
    return torch.stack([batch.input_ids.flatten()[batch.index], batch.targets], dim=1)


@settings(max_examples=60, deadline=None)
@given(groups=batches, max_tokens=st.integers(1, 300), of=st.integers(2, 4), varlen=st.booleans())
def test_parts_are_as_long_and_have_every_cell_and_every_token_once(
    groups: list[tuple[int, list[int]]], max_tokens: int, of: int, varlen: bool
) -> None:
    lengths = [(g, p, r) for g, (p, responses) in enumerate(groups) for r in responses]
    pieces = [piece(i, p, r, group=g) for i, (g, p, r) in enumerate(lengths)]
    packed = [pack(pieces, max_tokens=max_tokens, shape=shape(at, of, varlen=varlen)) for at in range(of)]
    for same in zip(*packed, strict=True):
        whole = same[0]
        here = [part(at, of).cut(batch) for at, batch in enumerate(same)]
        assert len({tuple(one.input_ids.shape) for one in here}) == 1
        for name in ("input_ids", "position_ids", "is_token"):
            assert torch.cat([getattr(one, name) for one in here], dim=1).equal(getattr(whole, name))
        mine = [cast(torch.Tensor, batch.own_tokens) for batch in same]
        assert torch.cat(mine).sort().values.tolist() == list(range(len(whole.index)))
        for one, own in zip(here, mine, strict=True):
            assert cells_of(one).equal(cells_of(whole)[own])
            assert one.sample.equal(whole.sample[own])
            assert one.until.equal(whole.until), "attention sees whole rows"


@pytest.mark.parametrize("of", [2, 3])
def test_routes_go_with_their_cells_and_what_a_part_chose_is_kept_where_it_is_read_again(of: int) -> None:
    routes = [random_routes(2 + n, RouteShape(2, 2, 8), seed=n) for n in range(1, 8)]
    pieces = [replace(piece(n, 2, n, group=n), routes=each) for n, each in enumerate(routes, start=1)]
    packed = [pack(pieces, max_tokens=20, shape=shape(at, of)) for at in range(of)]
    assert len(packed[0]) > 1
    for same in zip(*packed, strict=True):
        whole = cast(torch.Tensor, same[0].routes)
        for at, batch in enumerate(same):
            own = cast(torch.Tensor, part(at, of).cut(batch).routes)
            again = part(at, of).cut(replace(batch, routes=part(at, of).spread(own)))
            assert again.routes is not None
            assert again.routes.equal(own)
        here = [cast(torch.Tensor, part(at, of).cut(batch).routes) for at, batch in enumerate(same)]
        assert torch.cat(here, dim=1).equal(whole)
        spread = [part(at, of).spread(own + 3) for at, own in enumerate(here)]
        assert torch.stack(spread).sum(0).equal(whole.long() + 3), "each cell once"


def test_a_rank_that_has_run_out_has_a_part_of_nothing() -> None:
    for at in range(3):
        empty = part(at, 3).cut(empty_micro_batch(shape(at, 3)))
        assert empty.input_ids.shape == (1, 1)
        assert len(empty.index) == 0


@pytest.mark.parametrize("heads", [1, 4, 9, 12, 40])
def test_each_query_head_meets_its_own_head_of_keys_on_whatever_rank(heads: int) -> None:
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        for ranks in range(1, heads + 1):
            empty = share(heads, ranks) * ranks - heads
            sent = np.repeat(np.arange(kv_heads), repeats(heads, kv_heads, ranks))
            sent, asked = (np.pad(x, (0, empty)).reshape(ranks, -1) for x in (sent, np.arange(heads)))
            met = np.repeat(sent, asked.shape[1] // sent.shape[1], axis=1)  # as attention groups what a rank has
            assert (met == asked // (heads // kv_heads)).all(), (kv_heads, ranks)


def test_heads_that_do_not_divide_leave_some_ranks_idle() -> None:
    assert [idle(28, ranks) for ranks in (1, 4, 7)] == [0, 0, 0]
    assert idle(28, 8) == 4 / 32
    assert idle(9, 8) == 7 / 16


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
    model = build_model(str(make_family(tmp_path, "llama", **sizes)), MASKED)
    refuse_heads(model, 9)
    with pytest.raises(
        ConfigError, match=r"learner\.layout\.context = 10: .* has 9 attention heads; set it to 9 or less"
    ):
        part(0, 10).ways(model, ways_of(model))


@pytest.mark.parametrize("family", ["lfm2", "bamba", "qwen3_next"])
def test_a_model_that_looks_along_its_rows_by_itself_is_refused(tmp_path: Path, family: str) -> None:
    model = build_model(str(make_family(tmp_path, family)), MASKED)
    with pytest.raises(ConfigError, match=r"learner\.layout\.context = 2: .* cannot split its rows"):
        part(0, 2).ways(model, ways_of(model))


def test_ranks_in_a_row_share_samples_within_a_replica() -> None:
    layout = schema.Layout(replicas=2, context=2)
    world = [World(rank=rank, size=8, device=CPU, layout=layout) for rank in range(8)]
    assert [one.data_rank for one in world] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [one.rank for one in world if one.reports_samples] == [0, 2, 4, 6]
    assert world[0].data_size == 4
    refuse_layout(layout, 8)
    with pytest.raises(ConfigError, match=r"learner\.layout\.context = 2 .*ranks, 6: .*multiple of 4 ranks"):
        refuse_layout(layout, 6)


def test_a_group_that_another_rank_of_the_context_group_lacks_is_trained_by_none() -> None:
    groups = random_groups(2)
    found = Fetched(groups=tuple(groups), verdicts=np.array([0, GroupCheck.SOUND, GroupCheck.SOUND]), num_masked=0)
    assert found.agreed([GroupCheck.SOUND, GroupCheck.MISSING, GroupCheck.SOUND]) == (groups[1],)
