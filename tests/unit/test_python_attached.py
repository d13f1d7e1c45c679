"""Whether a run that was started elsewhere has ended, by what its Redis and its folder show."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ResourceError
from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.view import View
from streamrl.ops.python import attached
from streamrl.ops.python.attached import Attached, end_in_view
from streamrl.protocol.transport.types import RunState
from tests.feed_world import Clock
from tests.launch_world import make_report, make_run, make_snapshot
from tests.run_folders import make_folder

STARTING = make_report("learner/0", state="starting", doing="load")
LAUNCHING = make_report("launcher", state="starting", doing="start")


def seen(state: RunState | None, *reports: Any, holder: str | None = None) -> View:
    run = replace(make_run(), state=state) if state is not None else None
    return build_view(make_snapshot(run=run, holder=holder, reports=reports), run_name="run", server="here")


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    return make_folder(tmp_path, "run", "running")


@pytest.mark.parametrize("report", [STARTING, LAUNCHING])
@pytest.mark.parametrize("state", ["stopped", "failed", "finished", "running", None])
def test_a_run_that_is_taken_up_again_goes_on_whatever_redis_says_of_its_last_learner(
    crashed: Path, state: RunState | None, report: Any
) -> None:
    assert end_in_view(seen(state, report), crashed) is None


@pytest.mark.parametrize("state", ["stopped", "failed", "finished"])
def test_a_run_that_nobody_takes_up_has_ended(crashed: Path, state: RunState) -> None:
    ended = end_in_view(seen(state), crashed)
    assert ended is not None
    assert ended.state == state


def test_a_run_whose_learner_was_killed_has_crashed_though_its_redis_does_not_know(crashed: Path) -> None:
    ended = end_in_view(seen("running"), crashed)
    assert ended is not None
    assert (ended.state, ended.error) == ("failed", "run 'run' crashed at step 0; streamrl.start resumes it")


@pytest.mark.parametrize(
    ("holder", "reports"), [("me", ()), (None, [make_report("launcher", state="working", doing="watch")])]
)
def test_a_run_that_somebody_holds_or_watches_goes_on(crashed: Path, holder: str | None, reports: Any) -> None:
    assert end_in_view(seen("running", *reports, holder=holder), crashed) is None


def test_a_run_that_may_live_on_another_machine_goes_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "run", "running")
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"host": "', '"host": "other-'))
    assert end_in_view(seen("running"), folder) is None


def test_a_run_that_is_no_more_in_its_redis_is_an_error_after_some_patience(crashed: Path) -> None:
    with pytest.raises(ResourceError, match=r"^Redis at here holds nothing of run 'run' any more$"):
        end_in_view(seen(None), crashed)


def test_a_learner_that_was_killed_may_be_started_again_for_a_while(
    crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun, of which Redis knows nothing."""
    views, clock = [seen("running")], Clock()
    monkeypatch.setattr(attached, "_opened", lambda folder: nullcontext())
    monkeypatch.setattr(attached, "look_once", lambda source: views[-1])
    run = Attached(crashed, clock=clock)
    assert run.ended is None
    clock.advance(60.0)
    views.append(seen("running", holder="me"))
    assert run.ended is None
    views.append(seen("running"))
    clock.advance(100.0)
    assert run.ended is None, "that it was seen without a learner earlier does not count"
    clock.advance(121.0)
    assert run.ended is not None
    assert run.ended.state == "failed"
