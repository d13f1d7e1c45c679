"""The verdict on each ticket, from evidence made by hand."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.ops.audit.books import AuditBooks, Mask
from streamrl.ops.audit.commit import LastCommit
from streamrl.ops.audit.journal import Chain, Line
from streamrl.ops.audit.streams import Streams
from tests.run_folder import make_commit, make_streams

AUDIT = Path(__file__).parents[2] / "streamrl" / "audit"
TRAINED = Chain(
    files=frozenset(),
    lines=(Line(term=1, step=1, outcome="trained", ranges=((0, 4),)),),
    breaks=(),
)


def books(commit: LastCommit | None = None, chain: Chain = TRAINED, **streams: Any) -> AuditBooks:
    return AuditBooks(commit or make_commit(), chain, make_streams(**streams))


def numbers(mask: Mask) -> list[int]:
    return [int(n) for n in np.flatnonzero(mask)]


def test_open_tickets_are_outstanding_where_they_wait_or_where_their_group_does() -> None:
    found = books(tickets=((5, ""),), groups=(((50, 1), 4, ""),))
    assert (numbers(found.waiting), numbers(found.delivered), numbers(found.lost)) == ([5], [4], [])


def test_an_open_ticket_that_is_nowhere_is_lost() -> None:
    assert numbers(books(tickets=((5, ""),)).lost) == [4]


def test_a_group_up_to_the_cursor_counts_only_when_it_is_carried() -> None:
    found = books(groups=(((40, 1), 4, ""), ((50, 0), 5, "")))
    assert (numbers(found.delivered), numbers(found.lost)) == ([4], [5])
    assert found.num_leftover_groups == 1


def test_a_ticket_that_moved_between_the_scans_is_counted_once() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
        ),
        groups=(((51, 0), 4, ""),),
    )
    assert (numbers(found.outstanding), numbers(found.waiting), numbers(found.delivered)) == ([4, 5], [4, 5], [])


def test_tickets_issued_after_the_checkpoint_are_known_from_the_streams() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
            (6, ""),
            (9, ""),
        ),
        groups=(((51, 0), 7, ""),),
    )
    assert found.issued == 10
    assert numbers(found.lost) == [8]


def test_a_ticket_of_which_only_the_learners_counter_knows_is_lost() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
        ),
        issued=7,
    )
    assert numbers(found.lost) == [6]


def test_a_number_beyond_all_that_can_be_outstanding_was_made_up() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
        ),
        groups=(((51, 0), 17, ""), ((51, 1), 10**15, "")),
    )
    assert found.issued == 6
    assert found.foreign_entries() == {"groups/never_issued": 2}


def test_what_lies_beyond_the_learners_own_counter_was_never_issued_and_makes_no_gap() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
            (8, ""),
        ),
        groups=(((51, 0), 7, ""),),
        issued=6,
    )
    assert (found.issued, numbers(found.lost)) == (6, [])
    assert found.foreign_entries() == {"tickets/never_issued": 1, "groups/never_issued": 1}


def test_tickets_issued_while_the_streams_were_read_are_no_strangers() -> None:
    found = books(
        tickets=(
            (4, ""),
            (5, ""),
            (6, ""),
            (7, ""),
            (8, ""),
        ),
        issued=6,
        issued_since=2,
    )
    assert (found.issued, numbers(found.lost)) == (6, [])
    assert found.foreign_entries() == {"tickets/never_issued": 1}


def test_entries_about_tickets_that_have_ended_are_left_over() -> None:
    found = books(
        tickets=(
            (0, ""),
            (4, ""),
            (5, ""),
        ),
        groups=(((51, 0), 1, ""), ((51, 1), 4, ""), ((30, 0), 2, "")),
    )
    assert (found.num_leftover_tickets, found.num_leftover_groups) == (1, 2)
    assert not found.lost.any()


def test_a_ticket_the_checkpoint_calls_ended_and_the_journal_does_not_know_is_lost_even_if_it_is_there() -> None:
    commit = make_commit(resolved=((0, 5),), outcomes={"trained": 5})
    found = books(
        commit,
        tickets=(
            (4, ""),
            (5, ""),
        ),
    )
    assert numbers(found.lost) == [4]


def test_what_asks_for_something_else_under_a_number_of_ours_is_not_that_ticket_nor_its_answer() -> None:
    commit = make_commit(identities={4: "ours", 5: "ours"})
    found = books(commit, tickets=((4, "theirs"), (5, "ours")), groups=(((51, 0), 4, "theirs"), ((51, 1), 6, "new")))
    assert (numbers(found.lost), numbers(found.waiting), numbers(found.delivered)) == ([4], [5], [6])
    assert found.foreign_entries() == {"tickets/not_asked": 1, "groups/not_asked": 1}
    assert (found.num_leftover_tickets, found.num_leftover_groups) == (0, 0)


def test_without_a_look_at_the_streams_open_tickets_are_taken_to_be_there() -> None:
    found = AuditBooks(make_commit(), TRAINED, Streams())
    assert (numbers(found.outstanding), numbers(found.lost), numbers(found.waiting)) == ([4, 5], [], [])


def test_the_judge_shares_nothing_with_those_it_judges_but_the_wire_and_the_keys() -> None:
    imported = set()
    for path in AUDIT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module)
    ours = {name for name in imported if name.startswith(("streamrl", "learner"))}
    # An address is where a server is, with what password: it says nothing of what lies there.
    allowed = (
        "streamrl.ops.audit",
        "streamrl.protocol.wire",
        "streamrl.errors",
        "streamrl.protocol.transport.keys",
        "streamrl.protocol.transport.address",
    )
    assert [name for name in sorted(ours) if not name.startswith(allowed)] == []
