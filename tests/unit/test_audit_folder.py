"""Audits of folders alone, which are made by hand: without a server, as long after a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import DataError
from streamrl.ops.audit import Audit, audit_folder
from tests.helpers import make_unreadable
from tests.run_folder import RunFolder, clean_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return clean_folder(tmp_path / "run")


def sums(audit: Audit) -> tuple[int, int, dict[str, int], int, int]:
    return audit.issued, audit.trained, dict(audit.dropped), audit.dead, audit.outstanding


def wrong(audit: Audit) -> dict[str, int]:
    kinds = ("lost", "twice", "contradictory", "misanswered", "unproven")
    return {kind: getattr(audit, kind) for kind in kinds if getattr(audit, kind)}


def test_a_clean_run_balances(folder: RunFolder) -> None:
    audit = audit_folder(folder.path)
    assert sums(audit) == (12, 8, {"stale": 1}, 1, 2)
    assert (audit.run, audit.checkpoint, audit.term, audit.step) == ("run", "e000002-s00000020", 2, 20)
    assert audit.balanced
    assert audit.clean
    assert audit.redis is None
    assert audit.problems == ()


def test_what_needs_redis_is_said_to_be_unchecked(folder: RunFolder) -> None:
    [unchecked] = audit_folder(folder.path).unchecked
    assert "2 outstanding tickets" in unchecked


def test_after_the_last_ticket_has_ended_nothing_is_outstanding(folder: RunFolder) -> None:
    folder.journal("e000002-s00000020.1", (21, "dropped/zero_variance", [(9, 10), (11, 12)]), after="e000002-s00000020")
    outcomes = {"trained": 8, "dropped/stale": 1, "dead": 1, "dropped/zero_variance": 2}
    folder.checkpoint("e000002-s00000020", issued=12, ended=12, outcomes=outcomes, journal="e000002-s00000020.1")
    audit = audit_folder(folder.path)
    assert sums(audit) == (12, 8, {"stale": 1, "zero_variance": 2}, 1, 0)
    assert audit.clean
    assert "outstanding" not in audit.unchecked[0]


def test_the_audit_as_json_has_all_of_it(folder: RunFolder) -> None:
    told = json.loads(json.dumps(audit_folder(folder.path).to_json()))
    assert (told["issued"], told["dropped"], told["clean"], told["balanced"]) == (12, {"stale": 1}, True, True)
    assert set(told) == {*Audit.__dataclass_fields__, "clean", "balanced"}


def test_a_ticket_that_ended_for_the_checkpoint_and_not_in_the_journal_is_lost(folder: RunFolder) -> None:
    folder.journal("e000002-s00000020", (11, "trained", [(5, 8)]), (20, "dead", [(8, 9)]), after="e000001-s00000010")
    audit = audit_folder(folder.path)
    assert wrong(audit) == {"lost": 1}
    assert audit.examples == {"lost": (10,)}
    assert "trained 7" in audit.problems[0]
    assert not audit.clean


def test_a_ticket_trained_at_two_steps_is_found(folder: RunFolder) -> None:
    folder.journal(
        "e000002-s00000020",
        (11, "trained", [(4, 8)]),
        (12, "trained", [(10, 11)]),
        (20, "dead", [(8, 9)]),
        after="e000001-s00000010",
    )
    audit = audit_folder(folder.path)
    assert wrong(audit) == {"twice": 1}
    assert audit.examples == {"twice": (4,)}
    assert audit.trained == 8
    assert not audit.clean


def test_a_ticket_trained_and_dropped_is_a_contradiction(folder: RunFolder) -> None:
    folder.journal("e000001-s00000010", (5, "trained", [(0, 5)]), (9, "dropped/stale", [(3, 4)]))
    assert wrong(audit_folder(folder.path)) == {"contradictory": 1}


def test_tickets_that_were_ended_by_answers_to_something_else_are_counted(folder: RunFolder) -> None:
    lines = ((11, "trained", [(5, 8)]), (12, "trained", [(10, 11)]), (20, "dead", [(8, 9)]))
    folder.journal("e000002-s00000020", *lines, after="e000001-s00000010", answered={11: {"6": "another"}})
    audit = audit_folder(folder.path)
    assert wrong(audit) == {"misanswered": 1}
    assert audit.examples == {"misanswered": (6,)}
    assert not audit.clean


def test_a_ticket_that_the_journal_ends_and_the_checkpoint_would_train_again_is_a_problem(folder: RunFolder) -> None:
    folder.checkpoint("e000002-s00000020", issued=12, ended=9, outcomes={"trained": 8, "dropped/stale": 1, "dead": 1})
    audit = audit_folder(folder.path)
    assert audit.problems == ("1 tickets have ended in the journal, but are open in the checkpoint",)
    assert not audit.clean


def test_a_journal_that_ends_tickets_nobody_issued_is_a_problem(folder: RunFolder) -> None:
    outcomes = {"trained": 8, "dropped/stale": 1, "dead": 1}
    folder.checkpoint("e000002-s00000020", issued=10, ended=9, outcomes=outcomes)
    assert (
        "the journal records the end of 1 tickets that the checkpoint has not issued"
        in audit_folder(folder.path).problems
    )


def test_steps_of_a_replaced_learner_are_wasted_and_count_for_nothing(folder: RunFolder) -> None:
    """Term 1 did not notice at once that term 2 had taken over."""
    folder.journal("e000001-s00000015", (11, "trained", [(5, 7)]), (15, "trained", [(7, 8)]), after="e000001-s00000010")
    folder.checkpoint("e000001-s00000015", issued=12, ended=8)
    audit = audit_folder(folder.path)
    assert sums(audit) == (12, 8, {"stale": 1}, 1, 2)
    assert (audit.wasted_steps, audit.wasted_tickets) == (2, 3)
    assert audit.clean


def test_a_commit_that_failed_and_succeeded_later_wastes_nothing(folder: RunFolder) -> None:
    """As on a disk that was full for a while: what the first file held is in the second again."""
    folder.journal(
        "e000002-s00000015", (11, "trained", [(5, 8)]), (12, "trained", [(10, 11)]), after="e000001-s00000010"
    )
    audit = audit_folder(folder.path)
    assert (audit.wasted_steps, audit.trained, audit.clean) == (0, 8, True)


def test_a_journal_whose_checkpoint_is_not_there_yet_counts_for_nothing(folder: RunFolder) -> None:
    folder.journal("e000002-s00000030", (21, "trained", [(9, 10)]), after="e000002-s00000020")
    audit = audit_folder(folder.path)
    assert (audit.trained, audit.outstanding, audit.wasted_steps, audit.clean) == (8, 2, 0, True)


def test_pruned_checkpoints_are_not_missed(folder: RunFolder) -> None:
    shutil.rmtree(folder.path / "checkpoints" / "e000001-s00000010")
    assert audit_folder(folder.path).clean


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"trained", b"trainer"))


@pytest.mark.parametrize(
    "damage",
    [lambda path: cut(path, 40), lambda path: cut(path, 120), flip, lambda path: path.write_bytes(b"")],
)
def test_what_ended_in_a_torn_file_is_unproven_and_the_rest_is_still_told(folder: RunFolder, damage: Any) -> None:
    damage(folder.path / "journal" / "e000001-s00000010.jsonl")
    audit = audit_folder(folder.path)
    assert wrong(audit) == {"unproven": 5}
    assert (audit.trained, audit.dead, audit.outstanding) == (4, 1, 2)
    [problem] = audit.problems
    assert "'e000001-s00000010'" in problem
    assert not audit.clean


def test_files_before_a_torn_one_are_read_on(folder: RunFolder) -> None:
    cut(folder.path / "journal" / "e000002-s00000020.jsonl", 40)
    audit = audit_folder(folder.path)
    assert wrong(audit) == {"unproven": 5}
    assert (audit.trained, audit.dropped) == (4, {"stale": 1})


def test_a_missing_file_is_a_problem(folder: RunFolder) -> None:
    (folder.path / "journal" / "e000001-s00000010.jsonl").unlink()
    assert wrong(audit_folder(folder.path)) == {"unproven": 5}


def test_a_torn_file_of_a_dead_lineage_is_only_noted(folder: RunFolder) -> None:
    cut(folder.journal("e000001-s00000015", (11, "trained", [(5, 7)])), 10)
    audit = audit_folder(folder.path)
    assert audit.clean
    assert "e000001-s00000015" in audit.unchecked[0]


def test_a_lineage_that_goes_on_from_a_dead_one_is_a_problem(folder: RunFolder) -> None:
    """Term 2 claims to go on from step 10, and its journal from step 15."""
    folder.journal("e000001-s00000015", (11, "trained", [(5, 7)]), after="e000001-s00000010")
    folder.journal("e000002-s00000020", (16, "trained", [(7, 8)]), after="e000001-s00000015")
    audit = audit_folder(folder.path)
    assert any("'e000001-s00000015'" in problem for problem in audit.problems)
    assert not audit.clean


def test_a_damaged_newest_checkpoint_is_passed_over_and_told(folder: RunFolder) -> None:
    (folder.path / "checkpoints" / "e000002-s00000020" / "weights").write_bytes(b"w")
    audit = audit_folder(folder.path)
    assert (audit.checkpoint, audit.trained) == ("e000001-s00000010", 4)
    assert "its size is not 10 bytes" in audit.problems[0]


@pytest.mark.parametrize("file", ["manifest.json", "weights"])
def test_a_checkpoint_that_the_disk_does_not_give_ends_the_audit(folder: RunFolder, file: str) -> None:
    """Instead of an account of the one before, by which later tickets would be lost."""
    make_unreadable(folder.path / "checkpoints" / "e000002-s00000020" / file)
    with pytest.raises(OSError, match=f"symbolic links.*{file}"):
        audit_folder(folder.path)


def test_a_run_before_its_first_checkpoint_has_nothing_to_account_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert sums(audit_folder(folder.path)) == (0, 0, {}, 0, 0)
    folder.term(1)
    audit = audit_folder(folder.path)
    assert (audit.term, audit.checkpoint, audit.clean) == (1, None, True)


def test_a_folder_that_is_no_runs_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json does not exist"):
        audit_folder(tmp_path)


def test_a_run_whose_checkpoints_are_all_gone_cannot_be_audited(folder: RunFolder) -> None:
    shutil.rmtree(folder.path / "checkpoints")
    with pytest.raises(DataError, match="no checkpoint of the surviving lineage"):
        audit_folder(folder.path)


def test_a_long_run_is_audited_in_seconds(tmp_path: Path) -> None:
    """100,000 tickets that ended in no order at all: a range each."""
    folder = RunFolder(tmp_path / "run")
    folder.term(1)
    folder.journal("e000001-s00000010", (1, "trained", [(n, n + 1) for n in range(100_000)]))
    folder.checkpoint("e000001-s00000010", issued=100_000, ended=100_000)
    audit = audit_folder(folder.path)
    assert (audit.trained, audit.clean) == (100_000, True)
