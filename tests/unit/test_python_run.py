"""A run in a program's hands: its steps as they come, what it came to, how it is stopped and shown."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, PartError, ResourceError
from streamrl.ops.python.attached import Attached
from streamrl.ops.python.launcher import EndOfRun
from streamrl.ops.python.picture import InNotebook, html
from streamrl.ops.python.run import Run, attach, start
from streamrl.recipe.own import load_function
from tests.unit.test_display import busy_view, make_frame

FINISHED = EndOfRun(state="finished", steps=3, summary={"held_out": {"exact": [0.2, 0.7]}})


class LifeDouble:
    """Each wait is a moment of a run: what happens then is the test's. It has ended when nothing happens any more."""

    def __init__(self, *moments: Callable[[], object], ends: EndOfRun = FINISHED) -> None:
        self.phase = ""
        self.ended: EndOfRun | None = None
        self.stops: list[float | None] = []
        self._moments, self._ends = list(moments), ends

    def wait(self, timeout_s: float | None) -> bool:
        if self._moments:
            self._moments.pop(0)()
        else:
            self.ended = self._ends
        return self.ended is not None

    def end(self, timeout_s: float | None) -> None:
        self.stops.append(timeout_s)
        self.ended = EndOfRun(state="stopped", steps=2)


def line(step: int, *, term: int = 1, **metrics: float) -> str:
    return json.dumps({"step": step, "term": term, "at": 1.0, **metrics}) + "\n"


def trained(step: int, reward: float, *, term: int = 1, loss: float = 0.0) -> str:
    return line(step, term=term, **{"train_rollouts/rewards": reward, "train_optim/loss": loss})


def make_run(folder: Path, life: LifeDouble) -> Run:
    return Run(life, name="mine", folder=folder)


def test_steps_come_as_they_are_made_without_validations_and_each_when_its_line_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    def write(text: str) -> Callable[[], object]:
        def append() -> None:
            with file.open("a") as lines:
                lines.write(text)

        return append

    validation = line(0, **{"val_rollouts/rewards": 0.5})
    second = trained(2, 0.2)
    moments = (write(validation + trained(1, 0.1)), write(second[:9]), write(second[9:] + trained(3, 0.3)))
    life = LifeDouble(*moments)

    found = [(step.number, step.reward) for step in make_run(tmp_path, life)]

    assert found == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_of_steps_that_were_made_again_before_it_looks_the_later_ones_count(tmp_path: Path) -> None:
    lines = [trained(1, 0.1), trained(2, 0.2), trained(3, 0.3), trained(2, 0.9, term=2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))

    assert [(step.number, step.reward) for step in make_run(tmp_path, LifeDouble())] == [(1, 0.1), (2, 0.9)]


def test_a_line_that_a_crash_has_cut_off_is_no_step(tmp_path: Path) -> None:
    cut = trained(2, 0.2)[:9]
    (tmp_path / "metrics.jsonl").write_text(trained(1, 0.1) + cut + trained(2, 0.3, term=2) + trained(3, 0.4, term=2))

    assert [step.number for step in make_run(tmp_path, LifeDouble())] == [1, 3]


def test_a_run_that_fails_gives_its_steps_and_raises_its_error_wherever_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(trained(1, 0.1))
    failed = EndOfRun(state="failed", error="8 groups in a row have failed", kind=PartError)
    run = make_run(tmp_path, LifeDouble(ends=failed))
    steps = []

    with pytest.raises(PartError, match=r"^8 groups in a row have failed$"):
        steps.extend(run)
    for call in (run.wait, run.stop, run.watch):
        with pytest.raises(PartError, match=r"^8 groups in a row have failed$"):
            call()


def test_the_result_tells_what_the_run_came_to(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(trained(1, 0.1) + trained(3, 0.75))
    (tmp_path / "export").mkdir()

    result = make_run(tmp_path, LifeDouble()).wait()

    assert (result.name, result.state, result.steps, result.reward) == ("mine", "finished", 3, 0.75)
    assert (result.folder, result.export) == (tmp_path, tmp_path / "export")
    assert result.held_out == {"exact": [0.2, 0.7]}


def test_a_wait_that_is_too_short_leaves_the_run_alone(tmp_path: Path) -> None:
    life = LifeDouble(lambda: None)

    with pytest.raises(TimeoutError, match=r"'mine' has not ended within 0.5 s; it is still running"):
        make_run(tmp_path, life).wait(timeout=0.5)
    assert life.stops == []


def test_ctrl_c_ends_the_wait_and_not_the_run(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    life = LifeDouble(interrupt)
    run = make_run(tmp_path, life)

    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert (life.ended, life.stops) == (None, [])
    assert run.wait().state == "finished"


def test_stop_ends_it_within_its_time_once(tmp_path: Path) -> None:
    life = LifeDouble()
    run = make_run(tmp_path, life)

    assert (run.stop(timeout=20).state, run.stop().steps) == ("stopped", 2)
    assert life.stops == [20]


@pytest.mark.parametrize("error", [None, ValueError("of the program")])
def test_a_with_block_that_is_left_stops_the_run_that_goes_on(tmp_path: Path, error: Exception | None) -> None:
    life = LifeDouble()
    expected = pytest.raises(ValueError, match="of the program") if error is not None else contextlib.nullcontext()
    with expected, make_run(tmp_path, life):
        if error is not None:
            raise error
    assert life.stops == [None]

    ended = LifeDouble()
    with make_run(tmp_path, ended) as run:
        run.wait()
    assert ended.stops == []


def test_a_notebook_shows_the_launchers_panel_and_draws_it_in_one_place() -> None:
    calls: list[dict[str, Any]] = []
    with InNotebook(lambda data, **how: calls.append({"data": data, **how})) as canvas:
        canvas.show(make_frame(busy_view(), title="<mine>"))
        canvas.show(make_frame(None, phase="starting the parts"))

    first, second = calls
    assert "60/100" in first["data"]["text/html"]
    assert "&lt;mine&gt;" in first["data"]["text/html"]
    assert "starting the parts" in second["data"]["text/html"]
    assert (first["update"], second["update"]) == (False, True)
    assert first["display_id"] == second["display_id"]
    assert first["raw"]


def test_a_picture_is_html_without_what_a_model_may_have_written() -> None:
    assert "<script" not in html(make_frame(None, phase="<script>"))


def test_a_run_shows_itself_even_before_there_is_anything_to_see(tmp_path: Path) -> None:
    run = make_run(tmp_path, LifeDouble())

    assert repr(run) == f"<streamrl run 'mine' in {tmp_path}: running>"
    shown = re.sub(r"<[^>]+>|[│\s]+", " ", run._repr_html_())  # as long as the folder's name is, lines break anywhere
    assert "is not the folder of a run" in " ".join(shown.split())


def test_a_run_that_has_ended_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "name: mine\nredis: {url: embedded}\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "terms").mkdir()
    (tmp_path / "metrics.jsonl").write_text(trained(1, 0.1) + trained(2, 0.4))
    (tmp_path / "state.json").write_text(json.dumps({"state": "finished", "term": 1, "at": 5.0}))
    monkeypatch.chdir(tmp_path.parent)

    run = attach(tmp_path.name)

    assert [step.number for step in run] == [1, 2]
    assert (run.wait().reward, run.status().run.state) == (0.4, "finished")
    assert run.stop().state == "finished"


def test_a_redis_that_stays_away_ends_even_short_waits(tmp_path: Path) -> None:
    def write_state(state: str) -> None:
        (tmp_path / "state.json").write_text(json.dumps({"state": state, "term": 1, "at": 5.0}))

    (tmp_path / "config.yaml").write_text("name: mine\nredis: {url: embedded}\n")
    (tmp_path / "terms").mkdir()
    write_state("finished")
    now = 0.0
    life = Attached(tmp_path, clock=lambda: now)
    write_state("running")  # so that the state is in Redis, where nobody answers

    now = 1000.0
    assert not life.wait(0)
    now = 1119.0
    assert not life.wait(0)
    now = 1121.0
    with pytest.raises(ResourceError, match="is not running here"):
        life.wait(0)

    write_state("finished")
    assert life.wait(0)
    write_state("running")
    now = 2000.0
    assert not life.wait(0)


def test_a_script_that_is_loaded_for_a_function_of_it_starts_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin in each process that loads the function, and its own trials would load it again."""
    monkeypatch.chdir(tmp_path)
    unguarded = "import streamrl\ndef near(completions, **kwargs): return [1.0]\n"
    Path("train.py").write_text(unguarded + "streamrl.start('none.yaml', rewards=[near])\n")

    told = r"^train.py starts a run while it is loaded for a target; put that under `if __name__ == '__main__':`$"
    with pytest.raises(ConfigError, match=told):
        load_function("train.py:near", {})
    with pytest.raises(ConfigError, match=r"^there is no configuration file none\.yaml"):
        start("none.yaml", quiet=True)


def test_where_there_is_no_run_there_is_nothing_to_attach_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run"):
        attach(tmp_path)
