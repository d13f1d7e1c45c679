"""The hand keeps bodies for the rank that reads the stream, and no more of them than memory allows."""

from __future__ import annotations

import pytest

from streamrl.config import schema
from streamrl.learner.groups import plan
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.plan import ReadyGroup, ReadyGroups
from streamrl.protocol.wire.group import decode_header, encode_group
from tests.helpers import make_group, make_ticket


def make_hand() -> ReadyGroups:
    return ReadyGroups(ledger=Ledger(), lag=LagRule(schema.Lag()), groups_per_step=4, carry=())


def held(number: int) -> ReadyGroup:
    header, body = encode_group(make_group(make_ticket(number)))
    return ReadyGroup(f"{number}-0", decode_header(header), body)


def test_rank_0_gets_what_was_read_with_the_plan_and_others_do_not() -> None:
    one = held(3)
    assert one.planned(0).opened == (one.header, one.body)
    assert one.planned(1).opened is None


def test_bodies_beyond_the_bound_are_not_kept_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    body = held(0).body
    assert body is not None
    monkeypatch.setattr(plan, "_MAX_KEPT_BYTES", 2 * len(body))
    hand = make_hand()
    for number in range(3):
        hand.take(held(number))
    assert [one.body is not None for one in hand] == [True, True, False]
    assert hand.remove(2).planned(0).opened is None
    hand.remove(0)
    hand.take(held(4))
    assert [one.body is not None for one in hand] == [True, True]
    hand.put_back()
    hand.take(held(5))
    hand.take(held(6))
    assert [one.body is not None for one in hand] == [True, True]
