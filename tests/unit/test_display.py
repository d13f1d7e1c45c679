"""The launcher's display: readable at 80 x 24, fed by what can be seen of the run, safe to print."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from streamrl.ops.launch.display import Display, Frame, plain_line, render, spinner
from streamrl.ops.monitor.text import rows
from streamrl.ops.monitor.view import View
from streamrl.terminal import SPARKS, sparkline
from streamrl.versions import make_version
from tests.launch_world import NOW, make_record, make_report, make_snapshot, make_view, step_record


def make_frame(view: View | None, **changes: Any) -> Frame:
    fields: dict[str, Any] = {"title": "mine", "phase": "", "began": NOW - 65, "view": view, "footer": "logs there"}
    return Frame(**{**fields, **changes})


def draw(frame: Frame, *, width: int = 80) -> list[str]:
    console = Console(width=width, height=24, file=io.StringIO(), record=True)
    console.print(render(frame, now=NOW + 1, width=width, height=24))
    return console.export_text().splitlines()


def worker(number: int, **changes: Any) -> Any:
    detail = {"version": make_version(2, 57), "step": 57, "in_flight": 120, "tokens_per_s": 4321}
    return make_report(f"worker/{number}", **{"doing": "generate", "detail": detail, **changes})


def busy_view(num_workers: int = 2, **changes: Any) -> View:
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
        make_report("launcher", role="launcher", detail={"restarts": 4}),
        *(worker(number, **changes) for number in range(num_workers)),
    )
    snapshot = make_snapshot(reports=reports, latest_version=make_version(2, 60), latest_version_step=60)
    return make_view(*records, snapshot=snapshot)


def test_a_busy_run_fits_on_a_small_terminal() -> None:
    lines = draw(make_frame(busy_view(num_workers=12), phase="ending"))

    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("and 5 more" in line for line in lines)


def test_each_part_shows_what_it_does_how_old_that_is_and_how_far_behind_its_weights_are() -> None:
    lines = draw(make_frame(busy_view()))

    [line] = [line for line in lines if "│ 0 " in line]
    assert line.strip("│ ").split() == ["0", "generate", "3", "4", "321", "0.0s", "2.57", "120", "-"]
    assert any("waits for peers" in line for line in lines)


def test_a_worker_that_was_killed_is_not_shown_at_work() -> None:
    lines = draw(make_frame(busy_view(num_workers=1, at=NOW - 60)))

    assert any("SILENT 60s" in line for line in lines)
    assert not any("generate" in line for line in lines)


def test_progress_curve_and_facts_are_there() -> None:
    text = "\n".join(draw(make_frame(busy_view())))

    assert "step 60/100" in text
    assert "left 40s" in text  # a step a second, forty to go
    assert "exact 0.400 → 1.400" in text
    assert "540 dropped, 1200 trained" in text
    assert "lag 1.400  max lag 3" in text
    assert "4 of parts that died" in text


def test_steps_that_a_crash_undid_are_not_shown() -> None:
    before = [step_record(step, **{"train_rollouts/rewards": 1.0}) for step in range(1, 58)]
    again = replace(step_record(51, **{"train_rollouts/rewards": 2.0}), term=2, at=NOW + 60)
    view = make_view(*before, again)

    assert view.run.step == 51
    assert view.learner.rewards == (*[1.0] * 50, 2.0)
    assert view.run.eta_s is None  # what lies between two learners is no pace, and the second has made one step


def test_before_there_is_a_run_the_phase_is_all() -> None:
    absent = busy_view()
    for view in (None, replace(absent, run=replace(absent.run, state="absent"))):
        lines = draw(make_frame(view, phase="starting the parts"))
        assert "starting the parts" in lines[1]
        assert len(lines) == 3


def test_what_comes_from_other_machines_cannot_command_the_terminal() -> None:
    evil = make_report("worker/\x1b[2J", doing="\x1b]0;owned\x07", detail={"version": "\x1b[31m"})
    frame = make_frame(make_view(snapshot=make_snapshot(reports=(evil,))), title="a\x1bb", phase="c\x07d")

    assert "\x1b" not in "\n".join(draw(frame))
    assert "\x1b" not in plain_line(frame, now=NOW)


def test_a_run_whose_end_is_not_known_by_steps_shows_no_time_left() -> None:
    text = "\n".join(draw(make_frame(make_view(step_record(1), step_record(2), max_steps=-1))))

    assert "step 2 " in text
    assert "left" not in text


def test_all_that_a_monitor_tells_is_told_here_too() -> None:
    view = busy_view()
    text = "\n".join(draw(make_frame(view), width=100))

    for label, line in rows(view, width=96):
        assert label == "run" or line[:60] in text, line


def shown_for(seconds: int, view_at: Callable[[int], View]) -> list[str]:
    """The lines of a display without a terminal."""
    out, now = io.StringIO(), [0.0]
    display = Display(Console(file=out, width=80), clock=lambda: now[0])
    with display:
        for second in range(seconds):
            display.show(make_frame(view_at(second), phase="starting"))
            now[0] += 1
    return out.getvalue().splitlines()


def test_without_a_terminal_there_is_a_short_line_each_half_minute() -> None:
    view = busy_view()

    lines = shown_for(100, lambda second: view)

    assert lines[0] == "starting"
    assert len(lines) == 1 + 3
    assert all(len(line) <= 120 for line in lines)
    for word in ("step 60/100", "left 40s", "reward 0.500", "lag 1.400", "2 generate"):
        assert word in lines[1]


def test_without_a_terminal_what_goes_wrong_is_told_soon_and_so_is_its_end() -> None:
    well, ill = busy_view(), busy_view(num_workers=0)

    lines = shown_for(60, lambda second: ill if 40 <= second < 50 else well)

    assert ["there are no workers" in line for line in lines[1:]] == [False, True, False]


def test_without_a_terminal_a_run_that_has_not_begun_says_so() -> None:
    assert plain_line(make_frame(None), now=NOW) == "0:01:05  the learner is starting"


def test_without_a_terminal_news_are_told_soon_and_the_same_thing_seldom() -> None:
    out, now = io.StringIO(), [0.0]
    with spinner(Console(file=out), clock=lambda: now[0]) as say:
        for second in range(50):
            now[0] = float(second)
            say("starting" if second < 42 else f"step {second}")

    assert out.getvalue().split("\n")[:-1] == ["starting", "starting", "step 42", "step 47"]


def shown_on_terminal(use: Callable[[Display], None]) -> str:
    """What a display writes to a terminal."""
    reader, writer = pty.openpty()
    seen = b""
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        with Display(Console(file=out, width=80)) as display:
            use(display)
        print("the end", file=out, flush=True)
        while b"the end" not in seen:
            seen += os.read(reader, 1 << 16)
    os.close(reader)
    return seen.decode()


def test_a_word_of_the_launcher_stays_above_the_live_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def use(display: Display) -> None:
        display.show(make_frame(busy_view()))
        display.notify("worker/0 was ended by signal 9; restarting it")

    shown = shown_on_terminal(use)

    assert "worker/0 was ended by signal 9" in shown
    assert "╭─" in shown


def tell_all(display: Display) -> None:
    with display.checking() as say:
        say("trying rewards ...")
    display.show(make_frame(None, phase="starting the parts"))
    display.notify("worker/0 was ended by signal 9; restarting it")


LINES = ["trying rewards ...", "starting the parts", "worker/0 was ended by signal 9; restarting it"]


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_redraw_gets_the_lines_of_a_log(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)

    assert shown_on_terminal(tell_all).splitlines() == [*LINES, "the end"]


def test_a_log_is_no_terminal_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()

    with Display(Console(file=out, width=80)) as display:
        tell_all(display)

    assert out.getvalue().splitlines() == LINES


@pytest.mark.parametrize("make", [pty.openpty, os.pipe], ids=["terminal", "pipe"])
def test_a_launcher_whose_output_is_closed_goes_on_without_it(make: Callable[[], tuple[int, int]]) -> None:
    reader, writer = make()
    now = [0.0]
    with os.fdopen(writer, "w") as out:
        console = Console(file=out, force_terminal=out.isatty())
        with Display(console, clock=lambda: now[0]) as display:
            display.show(make_frame(None, phase="starting"))
            seen = b""
            while b"starting" not in seen:
                seen += os.read(reader, 1 << 16)
            os.close(reader)
            now[0] += 60
            display.show(make_frame(None, phase="ending"))
            display.notify("ended at once")
        with display.checking() as show:
            show("reward functions")
        console.print("the summary")
        assert console.is_terminal == (make is pty.openpty)
    # What was left in the file's buffer was written as it was closed: nowhere.


def test_a_sparkline_goes_from_low_to_high_and_is_never_wider_than_asked() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == SPARKS
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([3.0, 3.0], 10) == SPARKS[0] * 2
    assert sparkline([], 10) == ""
