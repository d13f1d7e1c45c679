"""What a rank makes of the groups of a plan: the verdict on each, and which tokens have a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import schema
from streamrl.learner.groups.fetch import Fetched, fetch_groups, mask_before
from streamrl.learner.groups.lag import oldest_trained_step
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan, PlanEntry
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from streamrl.protocol.wire.group import decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.versions import make_version
from tests.helpers import make_group, make_sample, make_ticket


class Ranks:
    """Groups in a stream, the plan of a step over them, and the ranks that fetch it."""

    def __init__(self, *groups: tuple[Sample, ...]) -> None:
        self.server = MemoryServer()
        entries = []
        for number, samples in enumerate(groups):
            header, body = encode_group(make_group(make_ticket(number), samples=samples))
            entry_id = self.server.append("train", number=number, run_uid="uid", header=header, body=body)
            digest = decode_header(header).digest
            entries.append(PlanEntry(entry_id=entry_id, ticket=number, digest=digest, rank=number % 2))
        self.plan = Plan(kind=Kind.STEP, step=10, entries=tuple(entries))

    def fetch(self, rank: int, *, oldest_step: int = 0, vocabulary: int = 1000) -> Fetched:
        stream = LearnerStreamDouble(self.server)
        return fetch_groups(stream, self.plan, rank=rank, vocabulary=vocabulary, oldest_step=oldest_step)

    def verdicts(self, **settings: Any) -> list[GroupCheck]:
        total = self.fetch(0, **settings).verdicts + self.fetch(1, **settings).verdicts
        return [GroupCheck(int(verdict)) for verdict in total]


def spanned(*steps: int) -> Sample:
    """Two tokens of each step's version."""
    spans = [Span(version=make_version(1, s), step=s, start=2 * i, end=2 * i + 2) for i, s in enumerate(steps)]
    return make_sample(num_tokens=2 * len(steps), spans=tuple(spans))


def test_each_rank_speaks_of_its_own_groups_and_the_sum_of_all() -> None:
    ranks = Ranks((spanned(9),), (spanned(9),), (spanned(9),))
    assert [group.header.ticket for group in ranks.fetch(0).groups] == [0, 2]
    assert [group.header.ticket for group in ranks.fetch(1).groups] == [1]
    assert ranks.verdicts() == [GroupCheck.SOUND] * 3


def test_a_group_that_is_gone_is_missing_and_one_that_was_replaced_is_malformed() -> None:
    ranks = Ranks((spanned(9),), (spanned(9),), (spanned(9),), (spanned(9), make_sample(num_tokens=900)))
    groups = ranks.server.groups["train"]
    del groups[ranks.plan.entries[0].entry_id]
    other = groups[ranks.plan.entries[2].entry_id]
    groups[ranks.plan.entries[1].entry_id] = other
    assert ranks.verdicts() == [GroupCheck.MISSING, GroupCheck.MALFORMED, GroupCheck.SOUND, GroupCheck.SOUND]
    assert ranks.verdicts(vocabulary=800)[2:] == [GroupCheck.SOUND, GroupCheck.MALFORMED]


def test_tokens_of_old_versions_get_no_loss_and_younger_ones_of_the_same_sample_do() -> None:
    fetched = Ranks((spanned(5, 6, 7), spanned(7))).fetch(0, oldest_step=6)
    [group] = fetched.groups
    assert group.samples[0].loss_mask().tolist() == [False] * 2 + [True] * 4
    assert group.samples[1].loss_mask().tolist() == [True] * 2
    assert fetched.num_masked == 2


def test_a_group_with_no_young_token_is_stale_and_one_without_tokens_is_not() -> None:
    ranks = Ranks((spanned(4, 5), spanned(5)), (make_sample(num_tokens=0), make_sample(num_tokens=0)))
    assert ranks.verdicts(oldest_step=6) == [GroupCheck.STALE, GroupCheck.SOUND]
    assert ranks.fetch(0, oldest_step=6).num_masked == 0, "of what is trained"


@pytest.mark.parametrize(("stale", "oldest"), [("mask", 6), ("keep", 0), ("wait", 0), ("drop", 0)])
def test_only_the_setting_mask_masks(stale: Any, oldest: int) -> None:
    assert oldest_trained_step(schema.Lag(max_steps=4, stale=stale), 10) == oldest


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 10),
)
def test_masking_takes_the_loss_from_exactly_the_old_tokens_and_gives_none(
    spans: list[tuple[int, int]], runs: list[int], oldest: int
) -> None:
    made: list[Span] = []
    for length, step in spans:
        start = made[-1].end if made else 0
        made.append(Span(version=make_version(1, step), step=step, start=start, end=start + length))
    num_tokens = made[-1].end
    before = np.resize(np.repeat(np.arange(len(runs)) % 2 == 0, runs), num_tokens) if sum(runs) else np.ones(num_tokens)
    sample = make_sample(num_tokens=num_tokens, spans=tuple(made), mask_runs=runs_of(before.astype(bool)))
    assert sample.loss_mask().tolist() == before.astype(bool).tolist()

    group, num_masked = mask_before(make_group(make_ticket(0), samples=(sample,)), oldest)
    young = np.concatenate([np.full(span.end - span.start, span.step >= oldest) for span in made])
    assert group.samples[0].loss_mask().tolist() == (before.astype(bool) & young).tolist()
    assert num_masked == int((before.astype(bool) & ~young).sum())


def runs_of(mask: Any) -> tuple[int, ...]:
    """As a worker may write them, with runs of no length."""
    runs: list[int] = []
    for value in mask:
        runs += [1, 0] if value else [0, 1]
    return tuple(runs)
