"""Causes in the parts of a run: the learner, its workers, and the weights that they serve."""

from __future__ import annotations

import time
from functools import partial

import pytest

from streamrl.ops.monitor.text import status_lines
from streamrl.protocol.transport.operator import set_control
from streamrl.protocol.transport.types import Announcement
from streamrl.versions import make_version
from tests.redis.monitor_world import Watched


def publish(run: Watched, *, step: int) -> None:
    """Version n is made by step n."""
    learner = run.world.learner
    version = make_version(learner.term, step)
    learner.stream.announce(Announcement(version=version, base=0, step=step, manifest=b"m"), keep=[])


def test_a_learner_whose_lease_has_run_out_is_gone(run: Watched) -> None:
    run.learner(ago_s=40)
    run.worker("tickets", state="waiting")
    run.world.client.delete(run.world.keys.lease)
    assert run.first() == ("learner_gone", "stalled")


def test_a_standby_is_shown_beside_a_learner_at_work_and_told_of_when_that_one_has_died(run: Watched) -> None:
    standby = partial(run.report, "standby/host-7", "lease", state="waiting", for_s=5, role="learner")
    standby()
    run.healthy()
    assert (run.causes(), run.view().verdict, run.view().learner.ranks) == ([], "healthy", 1)
    assert "others   standby/host-7 waits for lease" in "\n".join(status_lines(run.view()))
    run.learner(ago_s=40)
    run.worker("tickets", state="waiting")
    standby()
    [cause] = [cause for cause in run.view().causes if cause.name == "lease_held"]
    assert "standby/host-7" in cause.evidence


def test_a_learner_that_holds_its_lease_in_silence_is_restarting(run: Watched) -> None:
    run.learner(ago_s=40)
    run.worker("tickets", state="waiting")
    assert run.first() == ("learner_restarting", "stalled")


@pytest.mark.parametrize(
    ("doing", "state", "for_s", "cause", "verdict"),
    [
        ("lease", "waiting", 5, "lease_held", "stalled"),
        ("load the model", "starting", 5, "learner_starting", "healthy"),
        ("load the model", "starting", 500, "learner_starting", "stalled"),
        ("weights", "waiting", 5, "", "healthy"),
        ("weights", "waiting", 50, "publish_stuck", "stalled"),
        ("publish", "working", 50, "publish_stuck", "stalled"),
        ("train", "working", 500, "learner_stuck", "stalled"),
        ("checkpoint", "working", 5, "", "healthy"),
        ("checkpoint", "working", 150, "saving", "healthy"),
        ("export", "working", 1700, "saving", "healthy"),
        ("export", "working", 1900, "learner_stuck", "stalled"),
        ("evaluation", "waiting", 5, "evaluating", "healthy"),
        ("stragglers", "waiting", 5, "stragglers", "healthy"),
        ("stragglers", "waiting", 500, "stragglers", "stalled"),
    ],
)
def test_what_the_learner_does_or_waits_for_is_told(
    run: Watched, doing: str, state: str, for_s: float, cause: str, verdict: str
) -> None:
    run.record()
    run.learner(doing, state=state, for_s=for_s)
    run.worker()
    assert run.first() == (cause, verdict)


def test_a_first_step_that_takes_long_is_no_fault(run: Watched) -> None:
    run.learner("train", state="working", for_s=500)
    run.worker()
    assert run.first() == ("learner_stuck", "healthy")
    assert run.view().causes[0].title == "the learner's first step takes long"
    run.record()
    assert run.first() == ("learner_stuck", "stalled")


def test_a_learner_between_two_waits_is_not_stuck(run: Watched) -> None:
    run.record()
    publish(run, step=0)
    run.learner("publish", state="working", for_s=500, since=time.time())  # the groups after it are waited for
    run.worker()
    assert run.first() == ("", "healthy")
    run.learner("train", state="working", for_s=500, since=time.time())
    run.worker()
    assert run.first() == ("", "healthy")


async def test_a_learner_at_work_as_long_as_its_steps_take_is_not_stuck(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record(**{"timers/step": 400.0})
    run.learner("train", state="working", for_s=500)
    run.worker()
    assert run.first() == ("", "healthy")


def test_without_workers_the_tickets_wait(run: Watched) -> None:
    run.world.learner.plan()
    run.learner()
    assert run.first() == ("no_workers", "stalled")
    assert run.view().causes[0].evidence.startswith("6 tickets wait, and no worker reports")


def test_a_worker_that_was_killed_is_no_worker(run: Watched) -> None:
    run.learner()
    run.worker(ago_s=30)
    assert run.first() == ("no_workers", "stalled")
    run.worker(name="other")
    assert "workers_silent" in run.causes()


def test_a_death_is_news_for_a_while_and_then_told_without_spoiling_the_health(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker()
    run.worker(name="a", ago_s=7400)
    assert run.first() == ("workers_silent", "healthy")
    run.worker(name="b", ago_s=60)
    assert run.first() == ("workers_silent", "degraded")
    [cause] = run.view().causes
    assert cause.evidence == "2 of 3 no longer report: worker/b (60s), worker/a (2h)"


def test_engines_that_start_are_waited_for(run: Watched) -> None:
    run.learner()
    run.worker("start the engine", state="starting", for_s=30)
    assert run.first() == ("workers_starting", "healthy")
    run.worker("start the engine", state="starting", for_s=600)
    assert run.first() == ("workers_starting", "stalled")


@pytest.mark.parametrize("doing", ["import vLLM", "find the pretrained model"])
def test_workers_that_start_are_not_taken_for_slow_ones(run: Watched, doing: str) -> None:
    run.learner("groups", for_s=200)
    run.worker(doing, state="starting", for_s=30)
    assert "workers_starting" in run.causes()
    assert "generation_is_slow" not in run.causes()


def test_workers_without_any_weights_say_so(run: Watched) -> None:
    run.learner("publish", state="working")
    run.worker("weights", state="waiting", for_s=20)
    assert run.first() == ("workers_without_weights", "stalled")


def test_a_worker_that_waits_for_the_hosts_of_its_engine_says_how_many_and_where_they_join(run: Watched) -> None:
    run.learner("groups", for_s=300)
    missing = {"hosts": 1, "hosts_wanted": 2, "hosts_at": "0.0.0.0:9600"}
    run.worker("hosts", name="a", state="waiting", for_s=40, detail=missing)
    assert run.first() == ("workers_without_hosts", "stalled")
    [cause] = [cause for cause in run.view().causes if cause.name == "workers_without_hosts"]
    assert "worker/a on here has 1 of 2 hosts, for 40s; the others join at 0.0.0.0:9600" in cause.evidence
    run.worker(name="b", detail=SERVES)
    assert "workers_without_hosts" in run.causes()
    assert run.first()[1] != "stalled", "another worker generates"


OFF = "the engine's log-probs of the canary are 1.9 away from the learner's, 0.2 is let pass"
REJECTS = {"rejected": OFF, "rejected_version": "1.5"}
SERVES = {"rejected": "", "rejected_version": "", "version": make_version(1, 5)}


def test_weights_that_all_workers_reject_are_the_cause_and_not_that_they_wait_for_others(run: Watched) -> None:
    run.learner("groups", for_s=300)
    for name in "abcd":
        run.worker("weights", name=name, state="waiting", for_s=100, detail=REJECTS)
    assert run.first() == ("all_workers_reject", "stalled")
    [cause] = run.view().causes
    told = f"all 4 of them: worker/a on here rejects version 1.5 (also worker/b, worker/c and 1 more): {OFF}"
    assert cause.evidence == told
    assert "worker.engine=transformers" in cause.remedy


def test_a_lone_worker_that_rejects_the_weights_is_all_of_them(run: Watched) -> None:
    run.learner("groups")
    run.worker("start the engine", state="starting", detail=REJECTS)
    assert run.first() == ("all_workers_reject", "stalled")
    assert run.view().causes[0].evidence.startswith("the only one: worker/w on here rejects version 1.5: ")


def test_one_worker_that_rejects_what_others_serve_is_at_fault_itself(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker("weights", name="a", state="waiting", for_s=100, detail=REJECTS)
    run.worker(name="b", detail=SERVES)
    run.worker(name="c", detail=SERVES)
    assert run.first() == ("some_workers_reject", "degraded")
    [cause] = run.view().causes
    assert cause.evidence == f"1 of 3 deliver nothing: worker/a on here rejects version 1.5: {OFF}"
    assert "others serve" in cause.remedy


def test_before_the_others_serve_nobody_knows_whose_fault_a_rejection_is(run: Watched) -> None:
    run.learner("groups")
    run.worker("weights", name="a", state="waiting", detail=REJECTS)
    run.worker("start the engine", state="starting", name="b")
    assert "some_workers_reject" in run.causes()
    [cause] = [cause for cause in run.view().causes if cause.name == "some_workers_reject"]
    assert "have not loaded it yet" in cause.remedy


def test_a_worker_that_has_proved_a_version_since_rejects_nothing(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker(detail=SERVES)
    assert run.causes() == []


def test_a_worker_that_was_killed_rejects_nothing(run: Watched) -> None:
    run.learner("groups")
    run.worker(name="dead", ago_s=30, detail=REJECTS)
    run.worker(detail=SERVES)
    assert not {"all_workers_reject", "some_workers_reject"} & set(run.causes())


def test_a_peer_that_lied_is_named_while_it_lives(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker(name="a", detail={**SERVES, "peers": "10.0.0.1:9500", "peer_lied": "10.0.0.2:9500"})
    assert "peer_lied" in run.causes()
    [cause] = [cause for cause in run.view().causes if cause.name == "peer_lied"]
    assert "worker/a received a piece from 10.0.0.2:9500" in cause.evidence
    assert "no worker that reports" in cause.evidence

    run.worker(name="b", detail={**SERVES, "peers": "10.0.0.2:9500"})
    [cause] = [cause for cause in run.view().causes if cause.name == "peer_lied"]
    assert "worker/b on here" in cause.evidence

    run.worker(name="b", ago_s=30, detail={**SERVES, "peers": "10.0.0.2:9500"})
    assert "peer_lied" not in run.causes()


def test_a_run_that_failed_says_with_what_whatever_an_operator_says_later(run: Watched) -> None:
    told = f"all 2 workers reject version 1.5: {OFF}"
    run.world.learner.stream.event("failed", error=told)
    run.world.learner.stream.release("failed")
    run.worker("weights", state="waiting", detail=REJECTS)
    for word in ("pause", "run", "pause"):
        set_control(run.world.client, run.world.keys, word, by="the test")
    assert run.first() == ("failed", "ended")
    assert told in run.view().causes[0].evidence


def test_what_an_earlier_learner_failed_with_is_not_told_of_a_later_one(run: Watched) -> None:
    run.world.learner.stream.event("failed", error="of yesterday")
    run.world.learner.stream.release("failed")
    run.world.restart().stream.release("failed")
    assert run.first() == ("failed", "ended")
    assert "yesterday" not in run.view().causes[0].evidence


async def test_a_worker_that_holds_tickets_and_finishes_none_is_stuck(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.worker.lease(max_tickets=2, block_ms=0)
    run.learner("train", state="working")
    run.worker(for_s=500)
    assert run.first() == ("workers_stuck", "stalled")
    run.worker(name="quick")
    assert run.first() == ("workers_stuck", "degraded")


async def test_a_worker_whose_answers_or_rewards_take_long_is_not_stuck(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.worker.lease(max_tickets=2, block_ms=0)
    run.learner("train", state="working")
    run.worker(for_s=500, detail={"tokens_per_s": 900})
    assert run.first() == ("", "healthy")
    run.record(**{"timers/generate": 10.0, "timers/reward": 90.0})
    run.worker(for_s=500, detail={"tokens_per_s": 0})
    assert run.first() == ("", "healthy")


def test_workers_far_behind_on_weights_are_named(run: Watched) -> None:
    publish(run, step=9)
    run.learner("train", state="working")
    run.worker(detail={"version": make_version(1, 2), "step": 2})
    run.worker(name="new", detail={"version": make_version(1, 9), "step": 9})
    assert run.first() == ("weights_behind", "degraded")
    assert "worker/w serves 1.2, 7 steps behind 1.9" in run.view().causes[0].evidence
