"""Which checkpoint is the best: each has the score of its own weights, however late that comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import DataError, RunGone, TransportError
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, best_first
from streamrl.learner.checkpoints.resume import find_checkpoint, fork
from streamrl.learner.checkpoints.scores import BEST_METRIC, SCORE, read_score, write_score
from streamrl.learner.checkpoints.sealed import describe
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.metrics.record import ValidationResult
from streamrl.learner.publishing.shipping import Published
from streamrl.versions import make_version
from tests.conductor_world import RESULT, Scene, commit

KEEP_ONE = schema.Checkpoint(keep_last=1, keep_best=1)


class BackgroundThread:
    """A validation whose answers come some rounds later; the steps' weights are as good as they are here."""

    def __init__(self, rewards: Mapping[int, float | None]) -> None:
        self.rewards, self.started, self.lacking = rewards, list[int](), set[int]()
        self.trouble: Exception | None = None
        self._under_way: tuple[int, int, int] | None = None

    @property
    def running(self) -> bool:
        return self._under_way is not None

    def start(self, *, step: int, version: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.started.append(step)
        self._under_way = (step, version, 3)

    def poll(self, *, wait_s: float, paused: bool) -> ValidationResult | None:
        if self._under_way is None:
            return None
        step, version, looks = self._under_way
        self._under_way = (step, version, looks - 1) if looks > 1 else None
        if looks > 1:
            return None
        reward = self.rewards[step]
        metrics = {} if reward is None else {BEST_METRIC: reward}
        return replace(RESULT, step=step, version=version, metrics=metrics, ranks=step not in self.lacking)


class Run:
    """The order of things in the loop, as far as it matters here: publish, validate, save."""

    def __init__(self, folder: Path, rewards: Mapping[int, float], *, checkpoint: schema.Checkpoint = KEEP_ONE) -> None:
        self.validation = BackgroundThread(rewards)
        self.scene = Scene(folder, *[None] * 200, validation=self.validation, checkpoint=checkpoint)
        self.root, self.conductor = self.scene.checkpoints, self.scene.conductor
        self.term = self.root.claim_term("run").number
        self.latest: Published | None = None

    def go(self, *steps: int, every: int = 10, published_after: int = 0) -> None:
        """A version gets out with each step, so many steps late."""
        for step in steps:
            self.conductor.next_plan(step - 1)
            if step > published_after:
                self.publish(step - published_after)
            if step % every == 0:
                self.conductor.validate(step, self.latest)
                self.save(step)

    def publish(self, step: int) -> None:
        version = make_version(self.term, step)
        self.latest = Published(version=version, step=step, num_bytes=0, changed_fraction=0.0)
        self.conductor.note_published(self.latest)

    def save(self, step: int) -> None:
        name = CheckpointName(self.term, step)
        weights = self.root.new_folder(name) / "weights"
        weights.write_bytes(b"%d" % step)
        commit(self.conductor, name, {weights.name: describe(weights)})

    def validate(self) -> None:
        """As at the end of a run."""
        self.wait()
        assert self.latest is not None
        self.conductor.validate(self.latest.step, self.latest)
        self.wait()

    def wait(self) -> None:
        while self.validation.running:
            self.conductor.poll_validation()

    def scores(self) -> dict[int, float | None]:
        names = self.root.names(ancestry(self.root.root))
        return {name.step: read_score(self.root.folder_of(name)) for name in names}


def test_each_checkpoint_has_the_score_of_its_own_step_although_it_comes_later(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.9, 20: 0.3, 30: 0.35})
    run.go(*range(1, 41))
    assert run.scores() == {40: None, 10: 0.9}  # that of 40 is still to come
    assert find_checkpoint(f"{run.root.root}@best").state.step == 10


def test_a_validation_that_lacks_answers_makes_no_checkpoint_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.5, 20: 0.9, 30: 0.4}, checkpoint=schema.Checkpoint(keep_last=9))
    run.validation.lacking = {20}
    run.go(*range(1, 31))
    run.wait()
    assert run.scores() == {10: 0.5, 20: None, 30: 0.4}
    assert find_checkpoint(f"{run.root.root}@best").state.step == 10


def test_the_version_that_is_validated_is_the_first_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.5}, checkpoint=schema.Checkpoint(keep_last=9))
    run.go(*range(1, 11), published_after=2)
    assert run.validation.started == []
    run.publish(9)
    assert run.validation.started == []
    run.publish(10)
    assert run.validation.started == [10]


def test_where_no_version_has_just_these_weights_the_next_one_tells_how_good_they_are(tmp_path: Path) -> None:
    run = Run(tmp_path, {12: 0.5}, checkpoint=schema.Checkpoint(keep_last=9))
    run.go(*range(1, 11), published_after=2)
    run.publish(12)
    run.wait()
    assert run.scores() == {10: 0.5}


def test_a_checkpoint_that_is_being_validated_or_soon_will_be_is_not_removed(tmp_path: Path) -> None:
    run = Run(tmp_path, {4: 0.9, 8: 0.1})
    run.go(1, 2, 3, 4, every=4, published_after=1)
    run.save(5)
    assert set(run.scores()) == {5, 4}, "it waits for its version"
    run.publish(4)
    run.save(6)
    assert set(run.scores()) == {6, 4}, "its answers are on their way"
    run.wait()
    run.save(7)
    assert run.scores() == {7: None, 4: 0.9}


def test_a_score_that_is_there_before_its_checkpoint_is_added_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, {0: 0.1, 13: 0.7})
    run.go(11, 12, 13)
    run.validate()
    assert run.scores() == {}
    run.save(13)
    assert run.scores() == {13: 0.7}


def test_a_score_is_added_with_a_checkpoint_that_is_written_until_others_are_there(tmp_path: Path) -> None:
    run = Run(tmp_path, {0: 0.1, 10: 0.7, 13: 0.2})
    run.publish(10)
    run.validate()
    begun = run.conductor.begin_commit(CheckpointName(run.term, 10), consumed_samples=0)
    run.publish(13)
    run.validate()
    (run.root.new_folder(CheckpointName(run.term, 10)) / "weights").touch()
    begun.seal({})
    begun.announce()
    assert run.scores() == {10: 0.7}
    run.save(13)
    assert run.scores() == {13: 0.2, 10: 0.7}


def test_a_version_that_was_validated_for_an_older_checkpoint_is_also_its_own_checkpoints_score(tmp_path: Path) -> None:
    run = Run(tmp_path, {12: 0.5}, checkpoint=schema.Checkpoint(keep_last=9))
    run.go(*range(1, 11), published_after=2)
    run.publish(12)
    run.validate()
    run.save(12)
    assert run.validation.started == [12]
    assert run.scores() == {12: 0.5, 10: 0.5}


def test_while_redis_is_away_training_goes_on_without_a_validation(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.5, 20: 0.6})
    run.validation.trouble = TransportError("away")
    run.go(*range(1, 16))
    run.validation.trouble = None
    run.go(*range(16, 26))
    assert run.scores() == {20: 0.6}
    run.validation.trouble = RunGone("removed")
    with pytest.raises(RunGone):
        run.go(*range(26, 31))


def test_a_score_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.5})
    run.go(*range(1, 11))
    (run.root.folder_of(CheckpointName(1, 10)) / SCORE).mkdir()
    run.wait()
    assert run.scores() == {10: None}


def test_the_best_is_by_the_metric_that_is_asked_for_and_others_are_let_go(tmp_path: Path) -> None:
    run, metric = Run(tmp_path, {}, checkpoint=schema.Checkpoint(keep_last=9)), "val_rollouts/rewards_by_dataset/sums"
    for step, sums in ((10, 0.9), (20, 0.4), (30, 0.5)):
        run.save(step)
        write_score(run.root.folder_of(CheckpointName(1, step)), {BEST_METRIC: step / 100, metric: sums})
    names = [run.root.open(name) for name in run.root.names(ancestry(run.root.root))]

    assert [one.state.step for one in best_first(names)] == [30, 20, 10]
    assert [one.state.step for one in best_first(names, metric)] == [10, 30, 20]
    run.root.prune(ancestry(run.root.root), term=1, keep_last=1, keep_best=1, best_by=metric)
    assert set(run.scores()) == {10, 30}


def test_a_score_is_for_checkpoints_that_are_there(tmp_path: Path) -> None:
    write_score(tmp_path / "pruned", {BEST_METRIC: 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "null", '{"val_rollouts/rewards": "good"}', '{"val_rollouts/rewards": []}'])
def test_a_score_that_nobody_can_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / SCORE).write_text(text)
    assert read_score(tmp_path) is None


def test_a_run_whose_validations_nobody_answered_has_no_best_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    run.save(10)
    write_score(run.root.folder_of(CheckpointName(1, 10)), {"val_rollouts/num_prompts": 0.0})
    with pytest.raises(DataError, match="no checkpoint of the run has been validated"):
        find_checkpoint(f"{run.root.root}@best")


def test_a_fork_begins_without_the_score_of_what_it_was_made_from(tmp_path: Path) -> None:
    run = Run(tmp_path, {10: 0.5})
    run.go(*range(1, 15))
    made = fork(find_checkpoint(f"{run.root.root}@best"), tmp_path / "new", new_data=False)
    assert read_score(made.folder) is None
    assert CheckpointRoot(tmp_path / "new").open(made.name, digests=True) == made
