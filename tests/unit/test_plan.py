from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.groups.plan import Kind, Plan, PlanEntry, balance

entries = st.builds(
    PlanEntry,
    entry_id=st.tuples(st.integers(0, 1 << 45), st.integers(0, 1 << 32)).map(lambda pair: f"{pair[0]}-{pair[1]}"),
    ticket=st.integers(0, (1 << 63) - 1),
    digest=st.integers(0, (1 << 64) - 1),
    rank=st.integers(0, 1 << 16),
)


@given(st.sampled_from(Kind), st.integers(0, 1 << 40), st.lists(entries, max_size=5), st.integers(0, 1 << 40))
def test_a_plan_survives_its_journey(kind: Kind, step: int, made: list[PlanEntry], num_answered: int) -> None:
    plan = Plan(kind=kind, step=step, entries=tuple(made), num_answered=num_answered)
    assert Plan.from_bytes(plan.to_bytes()) == plan


def test_a_rank_finds_its_entries_with_their_places_in_the_accept_vector() -> None:
    made = tuple(PlanEntry(entry_id=f"{i}-0", ticket=i, digest=0, rank=i % 2) for i in range(5))
    plan = Plan(kind=Kind.STEP, step=0, entries=made)
    assert [(at, entry.ticket) for at, entry in plan.of_rank(1)] == [(1, 1), (3, 3)]
    assert plan.of_rank(7) == []


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_ranks_get_about_the_same_number_of_tokens(num_tokens: list[int], world_size: int) -> None:
    ranks = balance(num_tokens, world_size)
    loads = [sum(n for n, rank in zip(num_tokens, ranks, strict=True) if rank == r) for r in range(world_size)]
    assert max(loads) - min(loads) <= max(num_tokens, default=0)


def test_every_rank_gets_a_group_when_there_are_enough() -> None:
    assert sorted(balance([7, 7, 7, 7], 4)) == [0, 1, 2, 3]
    assert balance([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert balance([], 3) == []
