"""The launcher's display: readable at 80 x 24, fed by what can be seen of the run, safe to print."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from streamrl.launch.display import LiveDisplay, PlainDisplay, View, duration, plain_line, render
from streamrl.launch.watch import Watch
from streamrl.terminal import SPARKS, sparkline
from streamrl.versions import make_version
from tests.launch_world import NOW, make_record, make_report, make_snapshot, make_watch, step_record


def make_view(watch: Watch | None, **changes: Any) -> View:
    fields: dict[str, Any] = {"title": "mine", "phase": "", "began": NOW - 65, "watch": watch, "footer": "logs there"}
    return View(**{**fields, **changes})


def draw(view: View, *, width: int = 80) -> list[str]:
    console = Console(width=width, height=24, file=io.StringIO(), record=True)
    console.print(render(view, now=NOW + 1, width=width))
    return console.export_text().splitlines()


def worker(number: int, **changes: Any) -> Any:
    detail = {"version": make_version(2, 57), "step": 57, "in_flight": 120, "tokens_per_s": 4321}
    return make_report(f"worker/{number}", **{"doing": "generate", "detail": detail, **changes})


def busy_watch(num_workers: int = 2) -> Watch:
    metrics = {
        "train_rollouts/rewards": 0.5,
        "lag/mean": 1.4,
        "lag/max": 3.0,
        "stream/groups_trained": 1200.0,
        "stream/groups_dropped": 540.0,
    }
    records = [step_record(step, **metrics) for step in range(1, 61)]
    held_out = {"val_rollouts/rewards": 0.3, "val_rollouts/rewards/exact": 0.4, "val_rollouts/rewards/model": -0.5}
    records += [make_record(0, **held_out), make_record(50, **{name: value + 1 for name, value in held_out.items()})]
    reports = (
        make_report("learner/0", detail={"step": 60, "version": "2.60"}),
        make_report("learner/1", state="waiting", doing="peers"),
        *(worker(number) for number in range(num_workers)),
    )
    snapshot = make_snapshot(reports=reports, latest_version=make_version(2, 60), latest_version_step=60)
    return make_watch(*records, snapshot=snapshot)


def test_a_busy_run_fits_on_a_small_terminal() -> None:
    lines = draw(make_view(busy_watch(num_workers=12)))

    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("and 6 more" in line for line in lines)


def test_each_part_shows_what_it_does_how_old_that_is_and_how_far_behind_its_weights_are() -> None:
    lines = draw(make_view(busy_watch()))

    [line] = [line for line in lines if "worker/0" in line]
    assert line.strip("│ ").split() == ["worker/0", "generate", "1.0", "s", "2.57", "3", "120", "4", "321"]
    assert any("waits for peers" in line for line in lines)


def test_progress_curve_and_facts_are_there() -> None:
    text = "\n".join(draw(make_view(busy_watch())))

    assert "step 60/100" in text
    assert "left 0:40" in text  # a step a second, forty to go
    assert "exact 0.40 → 1.40" in text
    assert "1200 trained, 540 dropped" in text
    assert "1.4 (max 3) steps" in text


def test_steps_that_a_crash_undid_are_not_shown() -> None:
    before = [step_record(step, **{"train_rollouts/rewards": 1.0}) for step in range(1, 58)]
    again = replace(step_record(51, **{"train_rollouts/rewards": 2.0}), epoch=2, at=NOW + 60)
    watch = make_watch(*before, again)

    assert watch.step == 51
    assert watch.curve("train_rollouts/rewards") == [1.0] * 50 + [2.0]
    assert watch.seconds_left() == pytest.approx(49 * (60 - 32) / 19)  # at the pace of steps 32 to 51


def test_before_redis_is_there_the_phase_is_all() -> None:
    lines = draw(make_view(None, phase="starting the parts"))

    assert "starting the parts" in lines[1]
    assert len(lines) == 3


def test_what_comes_from_other_machines_cannot_command_the_terminal() -> None:
    evil = make_report("worker/\x1b[2J", doing="\x1b]0;owned\x07", detail={"version": "\x1b[31m"})
    watch = make_watch(snapshot=make_snapshot(reports=(evil,)))
    view = make_view(watch, title="a\x1bb", phase="c\x07d")

    assert "\x1b" not in "\n".join(draw(view))
    assert "\x1b" not in plain_line(view, now=NOW)


def test_a_run_whose_end_is_not_known_by_steps_shows_no_time_left() -> None:
    text = "\n".join(draw(make_view(make_watch(step_record(1), step_record(2), max_steps=None))))

    assert "step 2 " in text
    assert "left" not in text


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    out, now = io.StringIO(), [0.0]
    display = PlainDisplay(Console(file=out, width=80), clock=lambda: now[0])

    with display:
        for _ in range(12):
            display.show(make_view(busy_watch(), phase="starting"))
            now[0] += 1

    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["starting", *[line.split()[0] for line in lines[1:]]]
    assert len(lines) == 3
    assert "step 60/100" in lines[1]
    assert "worker/1: generate" in lines[1]


def test_a_word_of_the_launcher_stays_above_the_live_panel() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=80, force_terminal=True))

    with display:
        display.show(make_view(busy_watch()))
        display.say("worker/0 was ended by signal 9; starting it again")

    assert "worker/0 was ended by signal 9" in out.getvalue()


def test_a_sparkline_goes_from_low_to_high_and_is_never_wider_than_asked() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == SPARKS
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([3.0, 3.0], 10) == SPARKS[0] * 2
    assert sparkline([], 10) == ""


def test_durations_read_as_clocks_do() -> None:
    assert [duration(s) for s in (0, 65, 7387)] == ["0:00", "1:05", "2:03:07"]
