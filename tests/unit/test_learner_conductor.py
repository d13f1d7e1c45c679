"""What rank 0 decides for all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.errors import Fenced, TransportError
from streamrl.learner.conductor import Conducting, Follower
from streamrl.learner.groups.plan import GroupCheck, Kind, Outcome, Plan, PlanEntry
from streamrl.versions import make_version
from tests.conductor_world import FakeValidation, Scene, Wire, published, surroundings
from tests.feed_world import FeedWorld, make_config, planned
from tests.learner_cases import learner_config


def test_the_feeds_plan_is_handed_on_and_nothing_is_idle(tmp_path: Path) -> None:
    plan = Plan(kind=Kind.STEP, step=0)
    scene = Scene(tmp_path, None, plan)
    assert scene.conductor.next_plan(0).kind is Kind.IDLE
    assert scene.conductor.next_plan(0) is plan


def test_a_redis_that_is_away_for_a_moment_makes_an_idle_round(tmp_path: Path) -> None:
    assert Scene(tmp_path, TransportError("away")).kinds(0) == [Kind.IDLE]


def test_a_newer_learner_ends_this_one(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        Scene(tmp_path, Fenced("a newer term")).kinds(0)


def test_a_signal_stops_before_anything_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.stop.set()
    assert scene.kinds(0) == [Kind.STOP]
    assert scene.conductor.poll_validation() is Outcome.STOPPED
    assert scene.conductor.must_stop(after_s=1.0)
    assert scene.conductor.must_stop()


def test_while_no_step_may_be_made_a_commit_may_and_all_else_is_heard(tmp_path: Path) -> None:
    scene = Scene(tmp_path, max_steps=5)
    kinds = [scene.conductor.next_plan(4, may_train=False).kind for _ in range(2)]
    assert kinds == [Kind.COMMIT, Kind.IDLE]
    assert len(scene.stream.records) == 1, "the validation is looked after"
    assert scene.conductor.next_plan(5, may_train=False).kind is Kind.END
    scene.feed.control = "stop"
    assert scene.conductor.next_plan(4, may_train=False).kind is Kind.STOP
    scene.feed.control = "run"
    scene.stop.set()
    assert scene.conductor.next_plan(4, may_train=False).kind is Kind.STOP


def test_the_run_ends_at_its_last_step(tmp_path: Path) -> None:
    assert Scene(tmp_path, None, max_steps=5).kinds(4, 5) == [Kind.IDLE, Kind.END]


def test_a_job_whose_time_is_over_stops_whatever_it_does_and_leaves_the_end_of_the_run_to_the_next(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, None, max_time="00:00:02:00")
    assert scene.kinds(0) == [Kind.IDLE]
    assert not scene.conductor.must_stop()
    scene.clock.advance(20.0)
    assert scene.kinds(0) == [Kind.STOP]
    assert scene.conductor.poll_validation() is Outcome.STOPPED
    assert scene.conductor.must_stop(after_s=1.0)
    assert scene.conductor.must_stop()


def test_waiting_for_validation_is_idle_until_the_result_which_is_recorded(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert [scene.conductor.poll_validation() for _ in range(2)] == [Outcome.WAITING, Outcome.DONE]
    [(step, metrics)] = scene.stream.records
    assert (step, metrics["val_rollouts/rewards"]) == (3, 0.5)
    [line] = (scene.folder / "validation.jsonl").read_text().splitlines()
    assert json.loads(line)["samples"] == [{"prompt": "say", "completion": "5 6", "reward": 0.5, "fields": {"n": 1}}]


def test_a_newer_version_is_validated_when_the_one_before_is_done_and_none_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    older, newer = (published(make_version(1, step)) for step in (3, 4))
    scene.conductor.validate(newer.step, newer)
    assert scene.validation.started == [], "one of the older version still runs"
    assert [scene.conductor.poll_validation() for _ in range(2)] == [Outcome.WAITING, Outcome.DONE]
    scene.conductor.validate(older.step, older)
    scene.conductor.validate(newer.step, newer)
    assert scene.validation.started == [newer.step]


def test_a_validation_that_finds_redis_away_does_not_end_training_and_one_that_is_fenced_does(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    while scene.validation.running:
        scene.conductor.poll_validation()
    scene.validation.trouble = TransportError("Redis is away")
    scene.conductor.validate(4, published(make_version(1, 4)))
    assert len(scene.validation.started) == 1
    scene.validation.trouble = Fenced("a newer term")
    with pytest.raises(Fenced):
        scene.conductor.validate(5, published(make_version(1, 5)))


def test_a_validation_hears_of_a_pause_beside_training_and_when_all_wait_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None, None)
    scene.validation.look_for_ever()
    for control in ("pause", "run"):
        scene.feed.control = control
        scene.kinds(3)
        scene.conductor.poll_validation()
    assert scene.validation.paused == [True, True, False, False]


def test_validation_runs_beside_training(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None, None)
    assert scene.kinds(3, 3) == [Kind.IDLE, Kind.IDLE]
    assert len(scene.stream.records) == 1


def test_a_record_names_known_metrics_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.conductor.record(1, {"train_optim/loss": 0.5, "policy/ess": float("nan")})
    [line] = (scene.folder / "metrics.jsonl").read_text().splitlines()
    assert {"step": 1, "train_optim/loss": 0.5, "stream/issued": 7.0}.items() <= json.loads(line).items()
    assert "policy/ess" not in json.loads(line)
    with pytest.raises(AssertionError, match="made/up"):
        scene.conductor.record(1, {"made/up": 1.0})


def test_a_pass_over_the_data_is_one_epoch_though_dead_tickets_were_retried_under_new_numbers(tmp_path: Path) -> None:
    world = FeedWorld(make_config(worker={"max_attempts": 1}), num_prompts=3)
    scene = Scene(tmp_path, feed=world.feed)
    world.plan()
    world.fail(1)
    world.plan()
    world.server.ask_for_retry(1)
    for numbers in ([0, 2], [3]):
        for number in numbers:
            world.answer(number)
        plan = world.plan()
        assert planned(plan) == numbers
        assert plan is not None
        scene.conductor.settle(plan, [GroupCheck.SOUND] * len(numbers), trained=True)
        world.step += 1
        world.publish()
        scene.conductor.record(world.step, {})
    assert [metrics["train_rollouts/epoch"] for _, metrics in scene.stream.records] == [1.0, 1.0]


def test_a_batch_is_progress_also_where_no_step_is_made_of_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.progress.working("train")
    for trained in (True, False):
        scene.clock.advance(60.0)
        scene.progress.working("train")
        entry = PlanEntry(entry_id="5-1", ticket=3, digest=1, rank=0)
        scene.conductor.settle(Plan(kind=Kind.STEP, step=0, entries=(entry,)), [GroupCheck.SOUND], trained=trained)
        report = scene.progress.report()
        assert report.at - report.last_progress == pytest.approx(0.0)


def test_a_record_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (scene.folder / "metrics.jsonl").mkdir()
    scene.conductor.record(1, {"train_optim/loss": 0.5})
    assert scene.stream.records


def test_weights_that_redis_lost_are_published_again_and_looked_for_now_and_then(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *[None] * 4)
    scene.stream.manifests = {7, 8}
    scene.conductor.note_published(published(8, 7))
    assert scene.kinds(8, 8) == [Kind.IDLE, Kind.IDLE]
    assert scene.stream.looks == 1
    scene.stream.manifests = set()
    assert scene.kinds(8) == [Kind.IDLE]
    scene.clock.advance(5.0)
    assert scene.kinds(8, 8) == [Kind.PUBLISH, Kind.IDLE]


def test_a_delta_on_a_version_that_redis_lost_is_no_use_to_anybody(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None)
    scene.stream.manifests = {9}  # announced after the rest was lost
    scene.conductor.note_published(published(9, 8))
    assert scene.kinds(9) == [Kind.PUBLISH]
    scene.stream.manifests = {10}
    scene.conductor.note_published(published(10))
    assert scene.kinds(9) == [Kind.IDLE]


def test_while_redis_is_away_no_weights_are_missed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None)
    scene.stream.trouble = TransportError("away")
    scene.conductor.note_published(published(8))
    assert scene.kinds(8) == [Kind.IDLE]


def test_a_rank_that_follows_gets_what_rank_0_decides_and_records_nothing(tmp_path: Path) -> None:
    entry = PlanEntry(entry_id="5-1", ticket=3, digest=(1 << 64) - 1, rank=1)
    wire, plan = Wire(), Plan(kind=Kind.STEP, step=2, entries=(entry,))
    lead = Scene(tmp_path, plan, world=wire)
    follower = Follower(surroundings(learner_config(tmp_path), world=wire))
    assert [one.poll_validation() for one in (lead.conductor, follower)] == [Outcome.WAITING] * 2
    assert (lead.conductor.next_plan(2), follower.next_plan(2)) == (plan, plan)
    assert [one.poll_validation() for one in (lead.conductor, follower)] == [Outcome.DONE] * 2
    assert (lead.conductor.must_stop(), follower.must_stop()) == (False, False)
    lead.stop.set()
    assert (lead.conductor.must_stop(after_s=1.0), follower.must_stop(after_s=1.0)) == (True, True)
    num_records = len(lead.stream.records)
    follower.record(2, {"train_optim/loss": 0.5})
    assert len(lead.stream.records) == num_records


@pytest.mark.parametrize("waits_for", ["groups", "weights", "validation"])
def test_a_signal_to_a_rank_that_follows_ends_whatever_all_wait_for(tmp_path: Path, waits_for: str) -> None:
    wire, validation = Wire(), FakeValidation()
    validation.look_for_ever()
    lead = Scene(tmp_path, None, None, world=wire, validation=validation)
    around = surroundings(learner_config(tmp_path), world=wire)
    follower = Follower(around)

    def decide(conductor: Conducting) -> Kind | Outcome | bool:
        match waits_for:
            case "groups":
                return conductor.next_plan(0).kind
            case "weights":
                return conductor.must_stop()
            case _:
                return conductor.poll_validation()

    go_on, end = {
        "groups": (Kind.IDLE, Kind.STOP),
        "weights": (False, True),
        "validation": (Outcome.WAITING, Outcome.STOPPED),
    }[waits_for]
    around.stop.set()
    assert [decide(one) for one in (lead.conductor, follower)] == [go_on] * 2
    assert [decide(one) for one in (lead.conductor, follower)] == [go_on] * 2
    assert lead.stop.is_set()
    assert [decide(one) for one in (lead.conductor, follower)] == [end] * 2


def test_a_signal_to_rank_0_reaches_the_others(tmp_path: Path) -> None:
    wire = Wire()
    lead, around = Scene(tmp_path, world=wire), surroundings(learner_config(tmp_path), world=wire)
    lead.stop.set()
    follower = Follower(around)
    assert [one.next_plan(0).kind for one in (lead.conductor, follower)] == [Kind.STOP] * 2
    assert around.stop.is_set()
