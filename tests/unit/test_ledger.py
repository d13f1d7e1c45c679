from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learner.groups.ledger import DEAD, DROPPED, TRAINED, Ending, FeedState, Ledger, LedgerState
from streamrl.protocol.transport.types import Letter
from tests.feed_world import state_of


def test_outstanding_is_what_was_issued_and_has_not_ended() -> None:
    ledger = Ledger()
    ledger.issued = 6
    for number, outcome in ((0, TRAINED), (1, TRAINED), (4, f"{DROPPED}stale"), (5, DEAD)):
        ledger.resolve(number, outcome, step=1)
    assert ledger.outstanding == 2
    assert list(ledger.open_tickets()) == [2, 3]
    assert [ledger.is_open(n) for n in (-1, 0, 2, 5, 6)] == [False, False, True, False, False]
    assert dict(ledger.outcomes) == {TRAINED: 2, "dropped/stale": 1, DEAD: 1}
    assert dict(ledger.dropped()) == {"stale": 1}


def test_a_ticket_ends_once_and_only_after_it_was_issued() -> None:
    ledger = Ledger()
    ledger.issued = 1
    ledger.resolve(0, TRAINED, step=1)
    for number in (0, 1):
        with pytest.raises(AssertionError, match="not open"):
            ledger.resolve(number, TRAINED, step=1)


def test_failures_are_counted_until_the_ticket_ends() -> None:
    ledger = Ledger()
    ledger.issued = 2
    assert [ledger.failed(1), ledger.failed(1), ledger.attempts(1), ledger.attempts(0)] == [1, 2, 2, 0]
    ledger.resolve(1, DEAD, step=1)
    assert ledger.state().attempts == {}


def test_a_state_holds_a_low_watermark_and_the_exceptions_above_it() -> None:
    ledger = Ledger()
    ledger.issued = 10
    for number in (0, 1, 2, 4, 5, 8):
        ledger.resolve(number, TRAINED, step=1)
    state = ledger.state()
    assert (state.issued, state.watermark, state.exceptions) == (10, 3, ((4, 6), (8, 9)))


def test_what_ended_is_kept_until_it_is_committed() -> None:
    ledger = Ledger()
    ledger.issued = 5
    ledger.resolve(3, TRAINED, step=1)
    ledger.resolve(0, f"{DROPPED}stale", step=2)
    state = ledger.state()
    ledger.resolve(1, DEAD, step=2)
    assert ledger.uncommitted == (Ending(1, TRAINED, 3), Ending(2, "dropped/stale", 0), Ending(2, DEAD, 1))
    for _ in range(2):
        ledger.committed(state)
        assert ledger.uncommitted == (Ending(2, DEAD, 1),)
    ledger.committed(ledger.state())
    with pytest.raises(AssertionError, match="newer state"):
        ledger.committed(LedgerState(outcomes={TRAINED: 4}))


def test_a_ledger_that_goes_on_from_a_state_has_nothing_to_commit() -> None:
    state = LedgerState(issued=5, watermark=3, outcomes={TRAINED: 3})
    ledger = Ledger(state)
    ledger.committed(state)
    assert ledger.uncommitted == ()


def test_without_ticket_0_the_watermark_is_0() -> None:
    ledger = Ledger()
    ledger.issued = 3
    ledger.resolve(1, TRAINED, step=1)
    assert (ledger.state().watermark, ledger.state().exceptions) == (0, ((1, 2),))


@given(st.sets(st.integers(0, 30)), st.dictionaries(st.integers(31, 39), st.integers(1, 3)))
def test_a_stream_state_survives_json(resolved: set[int], failures: dict[int, int]) -> None:
    ledger = Ledger()
    ledger.issued = 40
    for number in resolved:
        ledger.resolve(number, TRAINED, step=1)
    for number, count in failures.items():
        for _ in range(count):
            ledger.failed(number)
    ledger.ignore("duplicate")
    versions = ((1 << 33, 4),)
    state = FeedState(cursor="5-3", carry=("5-1",), ledger=ledger.state(), versions=versions, journal="file")
    restored = state_of(json.loads(json.dumps(state.to_json())))
    assert restored == state
    assert Ledger(restored.ledger).state() == state.ledger


def test_what_is_not_committed_goes_to_the_journal_and_not_into_the_state() -> None:
    state = FeedState(journal="before", uncommitted=(Ending(1, TRAINED, 0),))
    assert state_of(state.to_json()) == FeedState(journal="before")
    assert state.committed("after") == FeedState(journal="after")


def test_a_fresh_state_survives_json_too() -> None:
    assert state_of(json.loads(json.dumps(FeedState().to_json()))) == FeedState()
    assert Ledger(LedgerState()).state() == LedgerState(letters={})


def test_which_tickets_are_dead_and_not_repeated_survives_json_with_their_errors() -> None:
    ledger = Ledger()
    ledger.issued = 4
    for number in (2, 0, 1):
        ledger.die(number, Letter("x" * 1000, 7.5), step=1)
    ledger.repeat(0, by=3)
    state = FeedState(ledger=ledger.state())
    restored = state_of(json.loads(json.dumps(state.to_json())))
    assert restored == state
    assert restored.ledger.letters == {number: Letter("x" * 300, 7.5) for number in (1, 2)}


def test_a_checkpoint_from_before_letters_were_noted_goes_by_those_that_redis_lists() -> None:
    state = LedgerState(issued=9, watermark=5, outcomes={TRAINED: 2, DEAD: 3}, retries={8: 1})
    ledger = Ledger(state_of(FeedState(ledger=state).to_json()).ledger)
    assert ledger.state().letters is None
    ledger.adopt_letters([4, 2, 1, 7, -1])
    assert list(ledger.state().letters or ()) == [2, 4], "1 was repeated, and 7 is open again"
    ledger.adopt_letters([0])
    assert list(ledger.letters) == [2, 4]


@pytest.mark.parametrize(
    ("cursor", "carry", "below"),
    [
        ("0-0", (), "0-1"),
        ("12-7", (), "12-8"),
        ("12-7", ("12-3", "9-8", "12-7"), "9-8"),
        ("100-0", ("99-5",), "99-5"),
    ],
)
def test_the_stream_may_be_trimmed_up_to_the_carry_or_past_the_cursor(
    cursor: str, carry: tuple[str, ...], below: str
) -> None:
    assert FeedState(cursor=cursor, carry=carry).trim_below == below
