from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamrl.errors import DataError, TransportError
from streamrl.learner.checkpoints.terms import (
    CheckpointName,
    Lineage,
    Term,
    ancestry,
    claim_run,
    claim_term,
    highest_term,
    parents_named_after,
)
from tests.helpers import make_unreadable


def claim(root: Path, parent: CheckpointName | None = None) -> Term:
    if parent is not None:
        (root / "checkpoints" / str(parent)).mkdir(parents=True, exist_ok=True)
    return claim_term(root, run_uid="uid", newest=lambda lineage: parent)


def test_names_of_checkpoints_sort_by_term_and_step_and_parse_back() -> None:
    name = CheckpointName(6, 120)
    assert str(name) == "e000006-s00000120"
    assert CheckpointName.parse(str(name)) == name
    assert CheckpointName.parse(".tmp-e000006-s00000120") is None
    assert CheckpointName(6, 120) < CheckpointName(6, 121) < CheckpointName(7, 1)


def test_the_run_keeps_the_uid_that_its_first_learner_gave_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        uids = set(pool.map(lambda _: claim_run(tmp_path / "run"), range(8)))
    assert len(uids) == 1
    assert claim_run(tmp_path / "run") in uids


def test_terms_count_from_one_and_no_two_learners_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = [term.number for term in pool.map(lambda _: claim(tmp_path), range(16))]
    assert sorted(numbers) == list(range(1, 17))
    assert highest_term(tmp_path) == 16


def test_terms_that_others_have_seen_are_passed_over(tmp_path: Path) -> None:
    claim(tmp_path)
    term = claim_term(tmp_path, run_uid="uid", newest=lambda lineage: None, known=7)
    assert term.number == 8
    assert claim_term(tmp_path, run_uid="uid", newest=lambda lineage: None, known=7).number == 9


def test_a_record_names_run_parent_host_and_time(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, CheckpointName(1, 30))
    record = json.loads((tmp_path / "terms" / "000002").read_text())
    assert (record["run_uid"], record["parent"]) == ("uid", "e000001-s00000030")
    assert {"host", "time"} <= set(record)


def test_the_lineage_is_empty_before_the_first_term(tmp_path: Path) -> None:
    assert ancestry(tmp_path) == Lineage({})
    assert not ancestry(tmp_path).holds(CheckpointName(1, 0))


def test_the_lineage_leaves_out_what_a_replaced_learner_wrote_after_it_was_replaced(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, CheckpointName(1, 20))
    claim(tmp_path, CheckpointName(2, 40))
    lineage = ancestry(tmp_path)
    assert lineage.holds(CheckpointName(1, 20))
    assert not lineage.holds(CheckpointName(1, 30))
    assert lineage.holds(CheckpointName(2, 40))
    assert not lineage.holds(CheckpointName(2, 41))
    assert lineage.holds(CheckpointName(3, 1000))
    assert not lineage.holds(CheckpointName(4, 1))


def test_an_term_that_made_no_checkpoint_hands_its_parent_on(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, CheckpointName(1, 20))
    claim(tmp_path, CheckpointName(1, 20))
    lineage = ancestry(tmp_path)
    assert lineage.holds(CheckpointName(1, 20))
    assert not lineage.holds(CheckpointName(2, 30)), "term 3 did not go on from term 2"


def test_the_parent_is_sought_in_the_lineage_of_the_term_before(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, CheckpointName(1, 20))
    seen: list[Lineage] = []

    def newest(lineage: Lineage) -> None:
        seen.append(lineage)

    claim_term(tmp_path, run_uid="uid", newest=newest)
    assert seen == [Lineage({2: None, 1: 20})]


def test_a_parent_that_is_pruned_while_it_is_claimed_is_chosen_again_in_the_same_lineage(tmp_path: Path) -> None:
    claim(tmp_path)
    answers = iter([CheckpointName(1, 20), CheckpointName(1, 40)])
    (tmp_path / "checkpoints" / "e000001-s00000040").mkdir(parents=True)
    term = claim_term(tmp_path, run_uid="uid", newest=lambda lineage: next(answers))
    assert term == Term(number=3, parent=CheckpointName(1, 40), run_uid="uid")
    assert ancestry(tmp_path).holds(CheckpointName(1, 40))


def test_a_learner_that_lost_its_lease_while_it_looked_for_its_parent_leaves_no_record(tmp_path: Path) -> None:
    claim(tmp_path)

    def replaced() -> None:
        raise TransportError("another has the lease")

    with pytest.raises(TransportError):
        claim_term(tmp_path, run_uid="uid", newest=lambda lineage: None, confirm=replaced)
    assert highest_term(tmp_path) == 1


def test_a_number_that_another_took_meanwhile_is_confirmed_again(tmp_path: Path) -> None:
    def slept_while_another_claimed() -> None:
        if highest_term(tmp_path) == 1:
            raise TransportError("another has the lease")
        claim(tmp_path)

    with pytest.raises(TransportError):
        claim_term(tmp_path, run_uid="uid", newest=lambda lineage: None, confirm=slept_while_another_claimed)
    assert highest_term(tmp_path) == 1


def test_parents_of_younger_terms_are_known(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, CheckpointName(1, 20))
    claim(tmp_path, CheckpointName(2, 30))
    assert parents_named_after(tmp_path, 1) == {CheckpointName(1, 20), CheckpointName(2, 30)}
    assert parents_named_after(tmp_path, 3) == set()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"parent": "somewhere"}', '{"parent": "e000009-s00000001"}'])
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    claim(tmp_path)
    (tmp_path / "terms" / "000001").write_text(text)
    with pytest.raises(DataError, match="000001"):
        ancestry(tmp_path)


def test_a_record_that_the_disk_does_not_give_is_not_a_damaged_one(tmp_path: Path) -> None:
    claim(tmp_path)
    make_unreadable(tmp_path / "terms" / "000001")
    with pytest.raises(OSError, match=r"symbolic links.*000001"):
        ancestry(tmp_path)
