"""The model of a run, from snapshots made by hand: what needs no server."""

from __future__ import annotations

import dataclasses
import json

import pytest

from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.text import status_lines, why_lines
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import SORTS, Screen
from streamrl.ops.monitor.view import View
from streamrl.ops.monitor.web.server import ActivityTrace
from streamrl.protocol.transport.snapshot import OldestLease, Snapshot, StreamCounts
from streamrl.protocol.transport.types import RunInfo
from streamrl.telemetry.progress import Liveness
from streamrl.terminal import age, number, size
from tests.launch_world import NOW, make_report, make_snapshot, make_view, step_record

CONFIG = {"training": {"max_steps": 100}, "rewards": {"exact": {}}, "lag": {"max_steps": 2}}


def configured(**changes: object) -> Snapshot:
    info = RunInfo(uid="uid", name="run", term=1, config_json=json.dumps(CONFIG), fingerprint="f", state="running")
    return make_snapshot(**{"run": info, **changes})


def view(snapshot: Snapshot, **more: object) -> View:
    return build_view(snapshot, run_name="run", server="here", **more)  # type: ignore[arg-type]


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    records = tuple(step_record(step) for step in range(1, 41))  # one a second
    run = view(configured(records=records, step=30)).run
    assert (run.step, run.max_steps, run.share_done, run.eta_s) == (40, 100, 0.4, pytest.approx(60))


def test_the_time_left_is_not_that_of_a_run_which_stood_still_between_two_learners() -> None:
    before = [step_record(step) for step in range(1, 31)]
    after = [dataclasses.replace(step_record(step), at=NOW + 86_400 + step, term=2) for step in range(31, 41)]
    assert view(configured(records=(*before, *after))).run.eta_s == pytest.approx(60)
    assert view(configured(records=(*before, after[0]))).run.eta_s is None


def test_a_run_ends_with_its_data_or_its_steps_whichever_is_first() -> None:
    slow = tuple(step_record(step, **{"train_rollouts/epoch": step / 400}) for step in range(1, 41))
    run = view(configured(records=slow)).run
    assert (run.share_done, run.eta_s) == (0.4, pytest.approx(60))
    quick = tuple(step_record(step, **{"train_rollouts/epoch": step / 50}) for step in range(1, 41))
    run = view(configured(records=quick)).run
    assert (run.share_done, run.eta_s) == (0.8, pytest.approx(10))


def test_the_time_left_of_a_fork_with_new_data_is_that_of_its_own_steps() -> None:
    records = tuple(step_record(1000 + own, **{"train_rollouts/epoch": own / 100}) for own in range(1, 11))
    run = view(make_snapshot(records=records)).run
    assert (run.step, run.share_done, run.eta_s) == (1010, 0.1, pytest.approx(90))


def test_a_pause_is_no_part_of_the_pace() -> None:
    paused_s = 8 * 3600.0
    times = {step: {"timers/step": paused_s if step == 31 else 1.0} for step in range(1, 41)}
    before = [step_record(step, **times[step]) for step in range(1, 31)]
    after = [dataclasses.replace(step_record(step, **times[step]), at=NOW + paused_s + step) for step in range(31, 41)]
    seen = view(configured(records=(*before, *after)))
    assert (seen.run.eta_s, seen.learner.step_s) == (pytest.approx(60), 1.0)
    assert view(configured(records=(*before, after[0]))).learner.step_s == 1.0
    assert view(configured()).learner.step_s is None


def test_a_learner_is_new_until_its_own_first_step() -> None:
    of_another = dataclasses.replace(step_record(1), term=0)
    told = [view(configured(records=records)).learner.is_new for records in ((), (of_another,), (step_record(1),))]
    assert told == [True, True, False]


def test_what_went_wrong_long_ago_holds_nothing_back() -> None:
    bad = {"stream/groups_trained": 10.0, "stream/groups_dropped": 990.0, "stream/dropped/stale": 990.0}
    ill = [step_record(step, **bad, **{"train_optim/skipped_steps": 3.0}) for step in range(1, 11)]
    well = [
        step_record(step, **{**bad, "stream/groups_trained": 10.0 + step, "train_optim/skipped_steps": 3.0})
        for step in range(11, 71)
    ]
    told = [cause.name for cause in view(configured(records=tuple(ill))).causes]
    assert {"most_groups_dropped", "steps_skipped"} <= {*told}
    found = view(configured(records=(*ill, *well)))
    assert not {"most_groups_dropped", "steps_skipped"} & {cause.name for cause in found.causes}
    assert (found.drops.dropped, found.drops_lately.dropped, found.drops_lately.trained) == (990, 0, 50)


def test_a_rate_of_the_whole_run_has_no_growth() -> None:
    rates = {60: 0.3, 120: 0.5}
    records = [step_record(step, **{"stream/drop_rate_by_length/128": rate}) for step, rate in rates.items()]
    seen = view(configured(records=tuple(records)))
    assert (seen.drops.rate_by_length, seen.drops_lately.rate_by_length) == ({"128": 0.5}, {})


def test_a_learner_that_comes_after_another_counts_its_skipped_steps_anew() -> None:
    skipped = {"train_optim/skipped_steps": 2.0}
    first = [step_record(step, **skipped) for step in range(1, 5)]
    second = [dataclasses.replace(step_record(step, **skipped), term=2) for step in range(5, 9)]
    assert view(configured(records=tuple(first))).learner.skipped_lately == 2
    assert view(configured(records=(*first, *second))).learner.skipped_lately == 4


def test_without_a_limit_on_steps_passes_over_the_prompts_tell_how_far_it_is() -> None:
    records = tuple(step_record(step, **{"train_rollouts/epoch": step / 40}) for step in range(1, 11))
    run = view(make_snapshot(records=records)).run
    assert (run.max_steps, run.share_done, run.eta_s) == (None, 0.25, pytest.approx(30))


def test_a_configuration_that_cannot_be_read_leaves_gaps_and_no_error() -> None:
    sections = {"lag": [1], "training": {"max_steps": "9", "max_epochs": 0}, "redis": 3, "rewards": "x", "worker": None}
    for text in ("", "[]", "null", "{", json.dumps(sections)):
        info = RunInfo(uid="u", name="run", term=1, config_json=text, fingerprint="f", state="running")
        assert view(make_snapshot(run=info)).limits.max_lag_steps is None


def test_a_wait_is_as_old_as_the_last_progress_though_it_is_entered_again_and_again() -> None:
    report = make_report("learner/0", state="waiting", doing="groups", since=NOW - 0.5, last_progress=NOW - 40)
    lead = view(make_snapshot(reports=(report,))).learner.lead
    assert lead is not None
    assert lead.doing_s == pytest.approx(40)


def test_the_oldest_lease_is_told_with_its_worker() -> None:
    lease = OldestLease(worker="w", issued_s=30.0, silent_s=2.0, times_leased=1)
    counts = StreamCounts(num_tickets=3, num_leased=2, leased_by={"w": 2}, num_groups=1, oldest_lease=lease)
    found = view(configured(streams={"train": counts, "eval": counts}, reports=(make_report("worker/w"),)))
    assert (found.train.oldest_worker, found.train.oldest_s, found.workers[0].leases) == ("w", 30.0, 4)


def test_who_watches_needs_no_clock_of_another_machine() -> None:
    now = 0.0
    liveness = Liveness(clock=lambda: now)
    wrong_clock = make_report("worker/a", at=NOW - 500)
    assert liveness.ages([wrong_clock], at=NOW)["worker/a"] == 500
    now = 1.0
    newer = dataclasses.replace(wrong_clock, at=NOW - 499)
    assert liveness.ages([newer], at=NOW + 1)["worker/a"] == 0
    now = 4.0
    assert liveness.ages([newer], at=NOW + 4)["worker/a"] == 3


@pytest.mark.parametrize("sort", list(SORTS))
@pytest.mark.parametrize("page", ["workers", "worker", "groups", "group", "causes", "help"])
def test_every_page_fits_on_any_terminal(sort: str, page: str) -> None:
    reports = tuple(make_report(f"worker/{'long-name-' * 6}{number}", detail={"step": 1}) for number in range(60))
    found = view(configured(reports=reports))
    screen = Screen(sort=sort, page=page, worker=reports[0].part)  # type: ignore[arg-type]
    for width, height in ((80, 24), (200, 50), (40, 12)):
        lines = draw(found, screen, width=width, height=height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width


def test_a_worker_that_rejects_weights_is_seen_at_a_glance() -> None:
    detail = {"rejected": "off by 2, 1 is let pass", "rejected_version": "1.5"}
    seen = view(configured(reports=(make_report("worker/w", state="waiting", doing="weights", detail=detail),)))
    [line] = [line for line in status_lines(seen) if line.startswith("workers")]
    assert "1 reject 1.5" in line
    assert any("REJECTS 1.5" in line.plain for line in draw(seen, Screen(), width=120, height=30))


def test_before_anything_is_known_the_screen_says_what_it_waits_for() -> None:
    text = "\n".join(line.plain for line in draw(None, Screen(), width=80, height=24, server="there:6379"))
    assert "waiting for Redis at there:6379" in text


def test_status_is_cut_to_a_terminal_and_whole_without_one() -> None:
    metrics = dict.fromkeys(("train_rollouts/rewards", "train_optim/loss", "policy/ess", "lag/mean", "lag/max"), 0.1234)
    losses = {f"loss/of_mine_{number}": 0.5 for number in range(5)}
    seen = make_view(step_record(1, **metrics, **losses))

    assert max(map(len, status_lines(seen))) <= 100
    told = "\n".join(status_lines(seen, width=None))
    assert "lag 0.123" in told
    assert "of_mine_4 0.500" in told


def test_the_status_of_an_empty_run_has_no_gaps() -> None:
    assert all(line.strip() for line in status_lines(view(make_snapshot())))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(999), "999 B"),
        (size(1_500_000), "1.5 MB"),
        (age(0.44), "0.4s"),
        (age(150), "2m"),
        (age(None), "-"),
        (number(1234567), "1.2M"),
        (number(0.5), "0.500"),
        (number(None), "-"),
    ],
)
def test_numbers_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_worker_that_starts_is_not_counted_at_work() -> None:
    starts = make_report("worker/w", state="starting", doing="import vLLM")
    seen = view(configured(reports=(starts, make_report("worker/v", doing="generate"))))
    trace = ActivityTrace()
    trace.add(seen)
    assert [worker.part.state for worker in seen.workers] == ["starting", "working"]
    assert trace.to_json()["idle"]["series"] == {"starting": [1], "works": [1]}


@pytest.mark.parametrize(
    ("model", "weights", "words"),
    [("bfloat16", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32, weights bfloat16")],
)
def test_what_a_run_computes_in_is_told(model: str, weights: str, words: str) -> None:
    config = {**CONFIG, "model": {"dtype": model}, "weights": {"dtype": weights}}
    info = RunInfo(uid="u", name="run", term=1, config_json=json.dumps(config), fingerprint="f", state="running")
    seen = dataclasses.replace(view(make_snapshot(run=info)), causes=())

    assert any(line.startswith("learner") and line.endswith(f"; in {words}") for line in status_lines(seen))
    assert why_lines(seen)[1].endswith(f"; in {words}")
    left = dataclasses.replace(seen, run=dataclasses.replace(seen.run, folder="runs/run"))
    assert f"dtype    {words}" in status_lines(left)
    assert (seen.to_json()["limits"]["model_dtype"], seen.to_json()["limits"]["weights_dtype"]) == (model, weights)
