"""A fork is a run of its own that begins where another one was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.resume import (
    ANY_DATA,
    check_data_left,
    check_model,
    check_steps,
    find_checkpoint,
    fork,
)
from streamrl.learner.checkpoints.scores import BEST_METRIC, write_score
from streamrl.learner.checkpoints.sealed import MANIFEST
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry, claim_run
from streamrl.learner.groups.ledger import CurriculumState, Ending, FeedState, Ledger
from streamrl.ops.audit import audit_folder
from streamrl.ops.cli.main import main
from tests.helpers import make_unreadable
from tests.learner_cases import learner_config
from tests.made_checkpoint import make_checkpoint


def make_run(folder: Path, *, steps: Mapping[int, float | None], curriculum: CurriculumState | None = None) -> Path:
    """A run with a checkpoint at each of these steps, each with its validation; 8 tickets issued, 5 ended."""
    root = CheckpointRoot(folder)
    uid = claim_run(folder)
    term = root.claim_term(uid)
    ledger = Ledger()
    ledger.issued = 8
    for number in (0, 1, 2, 5):
        ledger.resolve(number, "trained", step=1)
    ledger.resolve(3, "dropped/stale", step=1)
    journal: str | None = None
    uncommitted: tuple[Ending, ...] = ledger.uncommitted
    for step, score in steps.items():
        name = CheckpointName(term.number, step)
        (root.new_folder(name) / "train-00000-of-00001.safetensors").write_bytes(b"weights of %d" % step)
        made = root.commit(
            name,
            CheckpointState(
                run_uid=uid,
                step=step,
                stream=FeedState(
                    cursor="50-0",
                    carry=("40-0",),
                    ledger=ledger.state(),
                    curriculum=curriculum,
                    journal=journal,
                    uncommitted=uncommitted,
                ),
                data_fingerprint="data",
                extra={"consumed_samples": 16, "config": {"seed": 1}},
            ),
        )
        journal, uncommitted = made.state.stream.journal, ()
        write_score(made.folder, {} if score is None else {BEST_METRIC: score})
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_run(tmp_path / "old", steps={10: 0.5, 20: 0.9, 30: None})


def newest(folder: Path) -> Checkpoint:
    found = CheckpointRoot(folder).newest_complete(ancestry(folder))
    assert found is not None
    return found


@pytest.mark.parametrize(("which", "step"), [("", 30), ("@10", 10), ("@best", 20)])
def test_a_checkpoint_is_named_by_its_run_and_step(old: Path, which: str, step: int) -> None:
    assert find_checkpoint(f"{old}{which}").state.step == step


def test_the_best_is_found_beside_one_that_is_damaged_or_is_being_removed(old: Path) -> None:
    (old / "checkpoints" / "e000001-s00000030" / MANIFEST).unlink()
    assert find_checkpoint(f"{old}@best").state.step == 20


@pytest.mark.parametrize(
    ("which", "file"), [("", MANIFEST), ("@10", MANIFEST), ("@best", MANIFEST), ("@best", "validation.json")]
)
def test_what_the_disk_does_not_give_is_told_as_that(
    old: Path, which: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a damaged checkpoint, and the fork is not made from another one."""
    path = old / "checkpoints" / f"e000001-s000000{'30' if not which else '10'}" / file
    make_unreadable(path)
    assert main(["weights", "export", f"{old}{which}", "--to", str(old.parent / "model")]) == 2
    assert capsys.readouterr().err == f"error: {path}: Too many levels of symbolic links\n"


def test_a_checkpoint_is_named_by_its_own_folder(old: Path) -> None:
    assert find_checkpoint(str(old / "checkpoints" / "e000001-s00000020")).state.step == 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{old}@15", r"has no checkpoint of step 15; it has 10, 20, 30; @best"),
        ("{old}/nowhere", r"name the folder of a run"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(old: Path, text: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        find_checkpoint(text.format(old=old))


def test_a_fork_has_the_weights_and_the_step_and_a_life_of_its_own(old: Path, tmp_path: Path) -> None:
    fork(find_checkpoint(f"{old}@20"), tmp_path / "new", new_data=False)

    made = newest(tmp_path / "new")
    assert made.state.step == 20
    assert (made.folder / "train-00000-of-00001.safetensors").read_bytes() == b"weights of 20"
    assert made.state.run_uid != newest(old).state.run_uid
    assert made.state.extra["consumed_samples"] == 16
    assert "config" not in made.state.extra  # nothing is refused of what it changes
    assert (made.state.stream.cursor, made.state.stream.carry) == ("0-0", ())


def test_the_data_of_a_fork_go_on_behind_the_old_run_and_its_books_are_in_order(old: Path, tmp_path: Path) -> None:
    fork(find_checkpoint(f"{old}@20"), tmp_path / "new", new_data=False)

    ledger = Ledger(newest(tmp_path / "new").state.stream.ledger)
    assert list(ledger.open_tickets()) == [4, 6, 7]
    assert dict(ledger.outcomes) == {"dropped/before_fork": 5}
    found = audit_folder(tmp_path / "new", redis_url=None, run=None)
    assert (found.issued, found.outstanding, found.unproven, found.lost, found.clean) == (8, 3, 0, 0, True)


def test_a_fork_has_the_curriculum_of_the_old_run_unless_its_data_begin_anew(tmp_path: Path) -> None:
    known = CurriculumState(num_drawn=9, num_visited=20, places={4: (0, 7), 6: (1, 3), 7: (1, 2), 8: (1, 0)})
    old = make_run(tmp_path / "old", steps={10: None}, curriculum=known)
    for name, new_data in (("same", False), ("anew", True)):
        fork(find_checkpoint(str(old)), tmp_path / name, new_data=new_data)
    assert newest(tmp_path / "same").state.stream.curriculum == known
    assert newest(tmp_path / "anew").state.stream.curriculum is None


def test_a_fork_may_begin_its_data_anew(old: Path, tmp_path: Path) -> None:
    fork(find_checkpoint(str(old)), tmp_path / "new", new_data=True)

    state = newest(tmp_path / "new").state
    assert (state.stream.ledger.issued, state.data_fingerprint) == (0, ANY_DATA)


def test_a_fork_remembers_the_step_with_which_its_data_began(old: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("same", "anew", "again")]
    for source, place, new_data in zip((old, old, places[1]), places, (False, True, False), strict=True):
        fork(find_checkpoint(str(source)), place, new_data=new_data)
    assert [newest(place).state.extra["first_step"] for place in places] == [0, 30, 30]


def test_a_fork_that_would_have_no_step_to_make_is_refused(old: Path) -> None:
    source = find_checkpoint(f"{old}@20")
    for max_steps in (-1, 21):
        check_steps(source, schema.Training(max_steps=max_steps))
    with pytest.raises(ConfigError, match=r"training\.max_steps = 20: .*is at step 20.* 40 "):
        check_steps(source, schema.Training(max_steps=20))


@pytest.mark.parametrize(
    ("lora", "more", "told"),
    [
        ({"alpha": 64.0}, {}, r"model\.lora\.alpha: 32\.0 -> 64\.0: .* the weights that the former trains"),
        ({"rank": 16}, {}, r"model\.lora\.rank: 32 -> 16"),
        ({"targets": ("q_proj",)}, {}, r"model\.lora\.targets: "),
        (None, {}, r"model\.lora"),
        ({}, {"router": "frozen"}, r"model\.router: .trained. -> .frozen."),
        ({"dropout": 0.5}, {"dtype": "float32"}, None),
    ],
)
def test_a_fork_that_would_train_other_weights_is_refused(
    tmp_path: Path, lora: dict[str, Any] | None, more: dict[str, Any], told: str | None
) -> None:
    before = learner_config(tmp_path / "model", dir=tmp_path, model=schema.Model(path="m", lora=schema.Lora()))
    make_checkpoint(before)
    source = find_checkpoint(str(before.folder))
    model = schema.Model(path="m", lora=None if lora is None else schema.Lora(**lora), **more)
    after = before.model_copy(update={"model": model})
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_model(source, after)


def test_the_old_run_does_not_notice(old: Path, tmp_path: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()}

    before = content()
    fork(find_checkpoint(str(old)), tmp_path / "new", new_data=False)
    assert content() == before


def test_a_fork_needs_a_name_of_its_own(old: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the fork its own name"):
        fork(find_checkpoint(str(old)), old, new_data=False)


@pytest.mark.parametrize("command", [["weights", "export", "RUN", "--to", "made"], ["chat", "RUN"]])
def test_who_asks_for_the_model_of_a_fork_that_has_not_learned_is_sent_to_its_source(
    old: Path, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = find_checkpoint(f"{old}@20")
    fork(source, tmp_path / "new", new_data=False)
    assert main([word.replace("RUN", str(tmp_path / "new")) for word in command]) == 2
    told = capsys.readouterr().err
    assert f"what a fork begins with, and has no settings of its own; its weights are those of {source.folder}" in told
    assert main([word.replace("RUN", str(old)) for word in command]) == 2
    assert "made by another version of streamrl" in capsys.readouterr().err


def test_a_fork_may_forbid_that_it_is_resumed(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.yaml").write_text(
        f"name: new\ndir: {tmp_path}\nmodel: {{path: {tmp_path}/none}}\ndata: {{train: none.jsonl}}\n"
        "rewards: {r: {type: function, target: exact_match}}\nvalidation: {every_steps: 0}\n"
    )
    words = ["up", str(tmp_path / "new.yaml"), "checkpoint.resume=false"]
    assert main([*words, "--fork", str(old)]) == 2
    assert f"error: model.path = '{tmp_path}/none'" in capsys.readouterr().err, "what is wrong after the check"
    assert newest(tmp_path / "new").state.step == 30
    assert main(words) == 2
    assert "checkpoint.resume = false, but " in capsys.readouterr().err


@pytest.mark.parametrize("what", ["", "train-00000-of-00001.safetensors"])
def test_a_checkpoint_that_its_run_removes_before_the_fork_has_it_is_told_as_that(
    old: Path, tmp_path: Path, what: str
) -> None:
    source = find_checkpoint(f"{old}@20")
    gone = source.folder / what
    if what:
        (source.folder / MANIFEST).unlink()
        gone.unlink()
    else:
        shutil.rmtree(gone)
    with pytest.raises(DataError, match="its run has removed it meanwhile"):
        fork(source, tmp_path / "new", new_data=False)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_fork_is_not_made_of_files_that_are_damaged(old: Path, tmp_path: Path) -> None:
    source = find_checkpoint(f"{old}@20", digests=False)
    (source.folder / "train-00000-of-00001.safetensors").write_bytes(b"weights of 21")
    with pytest.raises(DataError, match="contents do not match their digest; fork from another checkpoint"):
        fork(source, tmp_path / "new", new_data=False)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_fork_goes_on_only_if_its_source_has_left_data(old: Path, tmp_path: Path) -> None:
    config = learner_config(tmp_path / "model", dir=tmp_path, name="new")

    def check(num_places: int) -> None:
        check_data_left(config, num_places=num_places)

    check(4)  # there is no checkpoint yet
    fork(find_checkpoint(f"{old}@20"), tmp_path / "new", new_data=False)
    check(4)  # three of its tickets are open
    fork(find_checkpoint(str(used_up(tmp_path / "used-up"))), tmp_path / "next", new_data=False)
    config = config.model_copy(update={"name": "next"})
    check(5)
    with pytest.raises(
        ConfigError, match=r"training\.max_epochs = 1: .*used-up/.* has used up the data; .* --new-data"
    ):
        check(4)


def used_up(folder: Path) -> Path:
    """A run whose four tickets have all ended."""
    root, uid = CheckpointRoot(folder), claim_run(folder)
    ledger = Ledger()
    ledger.issued = 4
    for number in range(4):
        ledger.resolve(number, "trained", step=1)
    name = CheckpointName(root.claim_term(uid).number, 1)
    root.new_folder(name)
    stream = FeedState(ledger=ledger.state(), uncommitted=ledger.uncommitted)
    root.commit(name, CheckpointState(run_uid=uid, step=1, stream=stream, data_fingerprint="data"))
    return folder


def test_a_fork_that_fails_leaves_nothing(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(CheckpointRoot, "commit", fail)
    with pytest.raises(OSError, match="no space"):
        fork(find_checkpoint(str(old)), tmp_path / "new", new_data=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    assert json.loads((old / "run.json").read_text())
