"""What a rank accepts of what the plan gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan, PlanEntry
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import decode_header, encode_group
from streamrl.protocol.wire.routes import RouteShape
from tests.learner_cases import group_of

VOCABULARY = 20


def stream_with(*entries: Entry) -> LearnerStreamDouble:
    server = MemoryServer()
    server.groups["train"] = {entry.id: entry for entry in entries}
    return LearnerStreamDouble(server)


def entry_of(number: int, *, responses: Sequence[Sequence[int]] = ((3, 4), (5, 6))) -> Entry:
    header, body = encode_group(group_of(rewards=[0, 1], ticket=number, responses=responses))
    return Entry(id=f"{number}-0", number=number, run_uid="run", header=header, body=body)


def plan_for(*entries: Entry) -> Plan:
    planned = tuple(
        PlanEntry(
            entry_id=entry.id,
            ticket=entry.number,
            digest=decode_header(entry.header).digest,
            rank=entry.number % 2,
        )
        for entry in entries
    )
    return Plan(kind=Kind.STEP, step=0, entries=planned)


def test_each_rank_takes_its_own_groups() -> None:
    entries = [entry_of(number) for number in range(4)]
    found = fetch_groups(stream_with(*entries), plan_for(*entries), rank=1, vocabulary=VOCABULARY)
    assert [group.header.ticket for group in found.groups] == [1, 3]
    assert found.verdicts.tolist() == [0, GroupCheck.SOUND, 0, GroupCheck.SOUND]


def spoilt(entry: Entry, how: str) -> Entry | None:
    match how:
        case "gone":
            return None
        case "another group":
            return replace(entry_of(entry.number, responses=[[7], [8]]), id=entry.id)
        case "another ticket":
            return replace(entry_of(entry.number + 2), id=entry.id)
        case "a flipped bit":
            return replace(entry, body=entry.body[:-1] + bytes([entry.body[-1] ^ 1]))
        case _:
            return replace(entry, header=b"\x00")


@pytest.mark.parametrize("how", ["gone", "another group", "another ticket", "a flipped bit", "no header"])
def test_what_is_not_the_planned_group_is_left_out_and_its_neighbour_is_not(how: str) -> None:
    good, bad = entry_of(0), entry_of(2)
    served = [entry for entry in (good, spoilt(bad, how)) if entry is not None]
    found = fetch_groups(stream_with(*served), plan_for(good, bad), rank=0, vocabulary=VOCABULARY)
    assert [group.header.ticket for group in found.groups] == [0]
    assert found.verdicts.tolist() == [GroupCheck.SOUND, GroupCheck.MISSING if how == "gone" else GroupCheck.MALFORMED]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    entry = entry_of(0, responses=[[3, VOCABULARY], [4]])
    assert not fetch_groups(stream_with(entry), plan_for(entry), rank=0, vocabulary=VOCABULARY).groups
    assert fetch_groups(stream_with(entry), plan_for(entry), rank=0, vocabulary=VOCABULARY + 1).groups


def test_a_group_without_its_teachers_word_is_refused_where_workers_ask_one() -> None:
    entries = [entry_of(0), entry_of(2)]
    group = group_of(rewards=[0, 1], ticket=2, responses=[[3, 4], [5, 6]])
    told = tuple(sample._replace(teacher_logprobs=np.full(2, -1, np.float32)) for sample in group.samples)
    header, body = encode_group(replace(group, samples=told))
    entries[1] = replace(entries[1], header=header, body=body)

    found = fetch_groups(stream_with(*entries), plan_for(*entries), rank=0, vocabulary=VOCABULARY, needs_teacher=True)

    assert [group.header.ticket for group in found.groups] == [2]
    assert found.verdicts.tolist() == [GroupCheck.MALFORMED, GroupCheck.SOUND]


def test_a_group_without_routes_or_with_those_of_another_model_is_refused_where_engines_tell_them() -> None:
    entries = [entry_of(0), entry_of(2)]
    group = group_of(rewards=[0, 1], ticket=2, responses=[[3, 4], []])
    routed = group.samples[0]._replace(routes=np.full((2, 3, 2), 7, np.uint8))
    prompt_routes = np.zeros((len(group.prompt_ids), 3, 2), np.uint8)
    header, body = encode_group(replace(group, samples=(routed, group.samples[1]), prompt_routes=prompt_routes))
    digest = decode_header(header).digest
    entries[1] = replace(entries[1], header=header, body=body)
    plan = plan_for(*entries)
    assert plan.entries[1].digest == digest

    for experts, verdict in ((8, GroupCheck.SOUND), (7, GroupCheck.MALFORMED)):
        shape = RouteShape(num_layers=3, num_chosen=2, num_experts=experts)
        found = fetch_groups(stream_with(*entries), plan, rank=0, vocabulary=VOCABULARY, routes=shape)
        assert found.verdicts.tolist() == [GroupCheck.MALFORMED, verdict]
