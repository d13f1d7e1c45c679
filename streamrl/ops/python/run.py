"""A run in a Python program: started or attached, followed step by step, awaited, stopped.

    run = streamrl.start("my.yaml", {"training.max_steps": 20}, rewards=[near])
    for step in run:                        # blocks until the next step is done
        print(step.number, step.reward)
    print(run.wait().export)                # raises the run's error if it has failed

A run that was started here ends with the program: in order at its exit, and even after `kill -9`. Ctrl-C (a notebook's
interrupt) ends only the wait that it interrupts: the run goes on until `stop`, or the end of a `with` block or of the
program; another one while it is being stopped ends it at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console

from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.ops.launch.display import Frame, spinner
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.view import View
from streamrl.ops.python.attached import Attached, look_at
from streamrl.ops.python.launcher import EndOfRun, Launcher, Life
from streamrl.ops.python.picture import canvas, html
from streamrl.ops.python.request import Rewards, make_request
from streamrl.ops.python.steps import Step, follow, to_step
from streamrl.recipe.own import refuse_while_loading

_LOOK_EVERY_S = 0.2
_SHOW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a run."""

    name: str
    state: Literal["finished", "stopped"]  # stopped: `start` with the same configuration resumes it
    steps: int  # in the last checkpoint or the export
    reward: float | None  # of the last step (`Step.reward`)
    folder: Path
    export: Path | None  # the trained model, for plain transformers; only of a finished run
    summary: Mapping[str, Any] | None  # what `streamrl up --json` prints; None: it ended before there was any

    @property
    def held_out(self) -> Mapping[str, tuple[float, float]]:
        """By reward source: its score in the first validation that ranks checkpoints, and in the last."""
        held_out: Mapping[str, tuple[float, float]] = (self.summary or {}).get("held_out", {})
        return held_out


def start(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    rewards: Rewards | None = None,
    takeover: bool = False,
    quiet: bool = False,
) -> Run:
    """Start a run on this machine, as `streamrl up` does, or resume it from its last checkpoint.

        run = streamrl.start("quickstart.yaml", {"training.max_steps": 20, "optimizer": {"lr": 1e-4}})
        run = streamrl.start({"extends": "pretrained.yaml", ...}, rewards={"near": near, "right": "exact_match"})

    `config` is a file, the name of a configuration that streamrl ships, or a map in place of a file. Keys of
    `overrides` may be dotted. `rewards`, functions by name or in a list, replace those of the configuration: each with
    streamrl's signature or TRL's, defined anywhere, or a value of `target`. Other settings of a source are overrides:
    `{"rewards.near.weight": 0.5}`.

    Returns when the parts run, after some seconds of checks and trials; `quiet` prints nothing meanwhile. Raises a
    StreamrlError with the message that the command would print: UserError if there is something for you to fix.
    `takeover` replaces a learner elsewhere that holds the run.
    """
    refuse_while_loading()
    launcher = Launcher(make_request(config, overrides, rewards, takeover=takeover))
    with spinner(Console(stderr=True, quiet=quiet)) as show:
        launcher.wait_until_started(show)
    return Run(launcher, name=launcher.name, folder=launcher.folder)


def attach(folder: str | Path) -> Run:
    """Return the run in this folder, running or ended, whoever started it. ConfigError if there is none.

    streamrl.attach("runs/quickstart").wait().reward
    """
    life = Attached(Path(folder).absolute())
    return Run(life, name=life.name, folder=Path(folder).absolute())


class Run:
    """A run on this machine, created by `start` or `attach`."""

    def __init__(self, life: Life, *, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._life, self._began = life, time.time()

    def __iter__(self) -> Iterator[Step]:
        """Yield its steps from the first on, and new ones until it ends; then raise its error if it has failed.

            rewards = [step.reward for step in run]

        A step that is repeated after a crash is yielded again.
        """
        yield from follow(self.folder, is_running=lambda: not self._life.wait(_LOOK_EVERY_S))
        self._ended().check()

    def status(self) -> View:
        """Return its current state: what `streamrl status --json` prints, typed; `to_json()` gives it as plain data.

        print(run.status().learner.metrics["lag/mean"], run.status().verdict)
        """
        return look_at(self.folder)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until it has ended. TimeoutError after so many seconds, and it goes on. Raises the run's error if it has
        failed: UserError if there is something for you to fix, else another StreamrlError.

            result = run.wait()
            model = AutoModelForCausalLM.from_pretrained(result.export)
        """
        if not self._life.wait(timeout):
            raise TimeoutError(f"run {self.name!r} has not ended within {timeout:g} s; it is still running")
        return self._result(self._ended())

    def stop(self, timeout: float | None = None) -> Result:
        """Finish the current step, write a checkpoint and end, as `streamrl stop` and Ctrl-C do. After so many seconds
        it is ended at once, and resumes from the checkpoint before when it is started again; a run that was not started
        here keeps stopping, and TimeoutError is raised. Does nothing if it has ended.

            run.stop(timeout=60)
        """
        if self._life.ended is None:
            self._life.end(timeout)
        return self._result(self._ended())

    def watch(self) -> None:
        """Display it, in the terminal or below a notebook's cell, until it has ended; then raise its error if it has
        failed. Ctrl-C ends only the display."""
        with canvas() as panel:
            is_over = False
            while not is_over:
                is_over = self._life.wait(_SHOW_EVERY_S)
                panel.show(self._frame())
        self._ended().check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it if it is running."""
        if self._life.ended is None:
            self._life.end(None)
            if error is None:
                self._ended().check()

    def __repr__(self) -> str:
        ended = self._life.ended
        return f"<streamrl run {self.name!r} in {self.folder}: {ended.state if ended else 'running'}>"

    def _repr_html_(self) -> str:
        return html(self._frame())

    def _frame(self) -> Frame:
        try:
            view = self.status()
        except (ConfigError, ResourceError, TransportError) as error:  # it is starting, or its Redis is busy
            return self._make_frame(None, str(error))
        return self._make_frame(view, self._life.phase)

    def _make_frame(self, view: View | None, phase: str) -> Frame:
        return Frame(title=self.name, phase=phase, began=self._began, view=view, footer=str(self.folder))

    def _ended(self) -> EndOfRun:
        ended = self._life.ended
        assert ended is not None, "called before the run has ended"
        return ended

    def _result(self, ended: EndOfRun) -> Result:
        ended.check()
        assert ended.state != "failed"
        steps = History.read_end(self.folder).steps.records
        export = self.folder / "export"
        return Result(
            name=self.name,
            state=ended.state,
            steps=ended.steps,
            reward=to_step(steps[-1]).reward if steps else None,
            folder=self.folder,
            export=export if ended.state == "finished" and export.is_dir() else None,
            summary=ended.summary,
        )
