from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import DataError, Fenced
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.scores import BEST_METRIC, SCORE, write_score
from streamrl.learner.checkpoints.sealed import MANIFEST
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.groups.ledger import Ending, FeedState, Ledger
from tests.helpers import make_unreadable


def state_of(step: int, **changes: Any) -> CheckpointState:
    ledger = Ledger()
    ledger.issued = step * 4
    fields: dict[str, Any] = {
        "run_uid": "uid",
        "step": step,
        "stream": FeedState(cursor=f"{step}-0", ledger=ledger.state()),
        "data_fingerprint": "data",
    }
    return CheckpointState(**{**fields, **changes})


def save(root: CheckpointRoot, term: int, step: int, **changes: Any) -> Checkpoint:
    name = CheckpointName(term, step)
    folder = root.new_folder(name)
    (folder / "weights-0-of-2.safetensors").write_bytes(b"w" * 100)
    (folder / "ranks").mkdir()
    (folder / "ranks" / "1.bin").write_bytes(bytes(range(256)))
    return root.commit(name, state_of(step, **changes))


@pytest.fixture
def root(tmp_path: Path) -> CheckpointRoot:
    root = CheckpointRoot(tmp_path)
    root.claim_term("uid")
    return root


def newest(root: CheckpointRoot) -> CheckpointName:
    checkpoint = root.newest_complete(ancestry(root.root))
    assert checkpoint is not None
    return checkpoint.name


def test_a_run_without_checkpoints_begins_from_the_start(root: CheckpointRoot) -> None:
    assert root.newest_complete(ancestry(root.root)) is None
    assert root.claim_term("uid").parent is None


def test_a_committed_checkpoint_is_found_with_its_state_and_files(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    made = save(root, 1, 20, extra={"best": {"step": 10}, "lr": 1e-6})
    found = root.newest_complete(ancestry(root.root))
    assert found == made
    assert found is not None
    assert (found.folder / "ranks" / "1.bin").read_bytes() == bytes(range(256))
    assert found.folder == root.root / "checkpoints" / "e000001-s00000020"


def with_endings(step: int, *endings: Ending, journal: str | None = None) -> FeedState:
    return FeedState(cursor=f"{step}-0", uncommitted=endings, journal=journal)


def journal_of(root: CheckpointRoot, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    path = root.root / "journal" / f"{checkpoint.state.stream.journal}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_commit_names_the_file_of_the_journal_that_has_what_ended(root: CheckpointRoot) -> None:
    first = save(root, 1, 10, stream=with_endings(10, Ending(9, "trained", 0)))
    assert first.state.stream == FeedState(cursor="10-0", journal="e000001-s00000010")
    assert root.open(first.name) == first
    second = save(root, 1, 20, stream=with_endings(20, Ending(11, "trained", 1), journal="e000001-s00000010"))
    header, line, _ = journal_of(root, second)
    assert (header["after"], line["tickets"]) == ("e000001-s00000010", [[1, 2]])


def test_the_journal_is_written_before_the_rename(root: CheckpointRoot) -> None:
    name = CheckpointName(1, 10)
    root.new_folder(name)
    (root.root / "checkpoints" / str(name)).symlink_to("nowhere")  # no folder can be renamed to this
    with pytest.raises(OSError, match="Not a directory"):
        root.commit(name, state_of(10))
    assert (root.root / "journal" / "e000001-s00000010.jsonl").exists()


def test_without_a_step_in_between_the_same_checkpoint_is_committed_anew(root: CheckpointRoot) -> None:
    first = save(root, 1, 10, stream=with_endings(10, Ending(9, "trained", 0)))
    weights = (first.folder / "weights-0-of-2.safetensors").stat().st_ino
    stream = with_endings(11, Ending(11, "dropped/stale", 1), journal=first.state.stream.journal)
    second = root.commit(first.name, state_of(10, stream=stream))
    assert second.state.stream == FeedState(cursor="11-0", journal="e000001-s00000010.1")
    assert root.newest_complete(ancestry(root.root)) == second
    assert (second.folder / "weights-0-of-2.safetensors").stat().st_ino == weights
    assert journal_of(root, second)[0]["after"] == "e000001-s00000010"
    assert len(journal_of(root, first)) == 3


def test_what_the_ranks_wrote_for_a_checkpoint_that_exists_is_thrown_away(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    save(root, 1, 10)
    assert [path.name for path in (root.root / "checkpoints").iterdir()] == ["e000001-s00000010"]


def test_before_the_rename_there_is_no_checkpoint(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    folder = root.new_folder(CheckpointName(1, 20))
    (folder / "weights").write_bytes(b"half")
    assert folder == root.temp_folder(CheckpointName(1, 20))
    assert newest(root) == CheckpointName(1, 10)


def test_a_second_attempt_at_a_checkpoint_starts_from_an_empty_folder(root: CheckpointRoot) -> None:
    (root.new_folder(CheckpointName(1, 10)) / "left over").write_bytes(b"")
    assert list(root.new_folder(CheckpointName(1, 10)).iterdir()) == []
    root.discard(CheckpointName(1, 10))
    assert not root.temp_folder(CheckpointName(1, 10)).exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:-40]),
        lambda folder: flip(folder / MANIFEST),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / "weights-0-of-2.safetensors").unlink(),
        lambda folder: (folder / "weights-0-of-2.safetensors").write_bytes(b"w" * 99),
        lambda folder: flip(folder / "ranks" / "1.bin"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    root: CheckpointRoot, damage: Callable[[Path], None]
) -> None:
    save(root, 1, 10)
    damage(save(root, 1, 20).folder)
    assert newest(root) == CheckpointName(1, 10)


@pytest.mark.parametrize("file", [MANIFEST, "weights-0-of-2.safetensors"])
def test_a_checkpoint_that_the_disk_does_not_give_is_never_passed_over(root: CheckpointRoot, file: str) -> None:
    save(root, 1, 10)
    path = save(root, 1, 20).folder / file
    was = path.read_bytes()
    make_unreadable(path)
    with pytest.raises(OSError, match="symbolic links") as raised:
        root.claim_term("uid")
    assert raised.value.filename in (path, str(path))
    path.unlink()
    path.write_bytes(was)
    assert root.claim_term("uid").parent == CheckpointName(1, 20)


def test_flipped_bits_are_only_seen_when_digests_are_asked_for(root: CheckpointRoot) -> None:
    flip(save(root, 1, 10).folder / "ranks" / "1.bin")
    assert root.newest_complete(ancestry(root.root), digests=False) is not None


def test_a_run_never_silently_begins_anew_when_its_checkpoints_are_damaged_or_gone(root: CheckpointRoot) -> None:
    folder = save(root, 1, 10).folder
    root.claim_term("uid")
    flip(folder / MANIFEST)
    with pytest.raises(DataError, match=r"none of the run.s checkpoints is complete"):
        root.claim_term("uid")
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"none of the run.s checkpoints is complete"):
        root.claim_term("uid")


def left_behind(root: CheckpointRoot, term: int, step: int) -> None:
    """By a learner that was replaced between its last look and its rename."""
    checkpoints = root.root / "checkpoints"
    newest = max(path for path in checkpoints.iterdir() if CheckpointName.parse(path.name))
    shutil.copytree(newest, checkpoints / str(CheckpointName(term, step)))


def test_a_replaced_learner_commits_nothing(root: CheckpointRoot) -> None:
    first = save(root, 1, 10)
    root.claim_term("uid")
    with pytest.raises(Fenced, match="term 2 has the run"):
        save(root, 1, 20)
    assert [name.step for name in root.names(ancestry(root.root))] == [10]
    assert not (root.root / "checkpoints" / "e000001-s00000020").exists()
    save(root, 2, 20)
    assert newest(root) == CheckpointName(2, 20)
    assert root.open(first.name, digests=True) == first


def test_the_checkpoint_that_a_younger_term_goes_on_from_keeps_its_state(root: CheckpointRoot) -> None:
    parent = save(root, 1, 10)
    assert root.claim_term("uid").parent == parent.name
    with pytest.raises(Fenced, match="term 2 has the run"):
        root.commit(parent.name, state_of(10, stream=with_endings(11, Ending(11, "dropped/stale", 1))))
    assert root.newest_complete(ancestry(root.root)) == parent


def test_what_a_replaced_learner_wrote_is_never_gone_on_from(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    assert root.claim_term("uid").parent == CheckpointName(1, 10)
    left_behind(root, 1, 20)
    assert newest(root) == CheckpointName(1, 10)
    assert root.claim_term("uid").parent == CheckpointName(1, 10)
    save(root, 3, 11)
    assert root.claim_term("uid").parent == CheckpointName(3, 11)


def kept(root: CheckpointRoot) -> list[tuple[int, int]]:
    return [(name.term, name.step) for name in root.names(ancestry(root.root))]


def prune(root: CheckpointRoot, *, term: int = 1, keep_last: int = 2, keep_best: int = 1) -> list[CheckpointName]:
    return root.prune(ancestry(root.root), term=term, keep_last=keep_last, keep_best=keep_best)


def test_pruning_keeps_the_last_and_the_best(root: CheckpointRoot) -> None:
    for step, reward in ((10, 0.1), (20, 0.9), (30, 0.3), (40, 0.4), (50, None)):
        write_score(save(root, 1, step).folder, {} if reward is None else {BEST_METRIC: reward})
    assert prune(root) == [CheckpointName(1, 30), CheckpointName(1, 10)]
    assert kept(root) == [(1, 50), (1, 40), (1, 20)]


def test_of_equally_good_checkpoints_the_newest_is_kept(root: CheckpointRoot) -> None:
    for step in (10, 20, 30):
        write_score(save(root, 1, step).folder, {BEST_METRIC: 1.0})
    prune(root, keep_last=1)
    assert kept(root) == [(1, 30)]


def test_an_term_prunes_its_ancestors_but_not_another_lineage(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    save(root, 1, 20)
    root.claim_term("uid")
    left_behind(root, 1, 30)
    for step in (21, 22):
        save(root, 2, step)
    prune(root, term=2)
    folders = sorted(path.name for path in (root.root / "checkpoints").iterdir())
    assert folders == ["e000001-s00000030", "e000002-s00000021", "e000002-s00000022"]


def test_a_replaced_learner_does_not_prune_what_its_successor_goes_on_from(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    lineage = ancestry(root.root)
    root.claim_term("uid")
    for step in (20, 30):
        left_behind(root, 1, step)
    assert root.prune(lineage, term=1, keep_last=1, keep_best=0) == []
    assert newest(root) == CheckpointName(1, 10)


def test_leftovers_of_dead_learners_are_cleaned_up(root: CheckpointRoot) -> None:
    save(root, 1, 10)
    root.new_folder(CheckpointName(1, 20))
    root.claim_term("uid")
    mine = root.new_folder(CheckpointName(2, 20))
    folder = root.root / "checkpoints"
    (folder / ".trash-e000001-s00000005").mkdir()
    (folder / ".trash-something").mkdir()
    prune(root, term=2)
    assert {path.name for path in folder.iterdir()} == {"e000001-s00000010", mine.name, ".trash-something"}


def test_a_damaged_checkpoint_is_left_for_people_to_look_at(root: CheckpointRoot) -> None:
    flip(save(root, 1, 10).folder / MANIFEST)
    for step in (20, 30):
        save(root, 1, step)
    assert prune(root, keep_last=1) == [CheckpointName(1, 20)]
    assert kept(root) == [(1, 30), (1, 10)]


@pytest.mark.parametrize("file", [MANIFEST, SCORE])
def test_nothing_is_removed_while_the_disk_does_not_give_what_decides_it(root: CheckpointRoot, file: str) -> None:
    for step in (10, 20, 30):
        write_score(save(root, 1, step).folder, {BEST_METRIC: 1.0 / step})
    make_unreadable(root.folder_of(CheckpointName(1, 10)) / file)
    with pytest.raises(OSError, match="symbolic links"):
        prune(root, keep_last=1)
    assert kept(root) == [(1, 30), (1, 20), (1, 10)]


def test_the_manifest_is_json_for_others_to_read(root: CheckpointRoot) -> None:
    manifest = json.loads((save(root, 1, 10).folder / MANIFEST).read_text())
    assert manifest["content"]["state"]["stream"]["ledger"]["issued"] == 40
    assert set(manifest["content"]["files"]) == {"weights-0-of-2.safetensors", "ranks/1.bin"}


def test_a_checkpoint_of_another_schema_is_refused_with_its_number(
    root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("streamrl.learner.checkpoints.sealed._SCHEMA", 1)
        save(root, 1, 10)
    with pytest.raises(
        DataError, match=r"none of the run.s checkpoints is complete; the newest: .*schema 1; this program"
    ):
        root.claim_term("uid")
