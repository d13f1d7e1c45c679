"""A demonstration from start to end: explanation, preparation, the run, the report.

It starts from the beginning each time: it clears its run's folder, if the folder is its own. Ctrl-C ends it at any
moment, with all processes that it has started.

Preparation writes files and runs programs side by side, each with a log. Blocks until all have ended, and shows the
last line that each has logged about its steps. Whatever in the run needs no model is tried meanwhile (`Trials`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from streamrl.config.check import check_config
from streamrl.config.load import Loaded, load_config
from streamrl.config.shipped import shipped_config
from streamrl.demos.report import Showcase, make_report, report_lines
from streamrl.errors import ConfigError, PartError
from streamrl.extras import Need
from streamrl.files import LOCK, naming, only_one
from streamrl.ops.launch.display import Display, spinner
from streamrl.ops.launch.forking import PartsAhead
from streamrl.ops.launch.processes import Command, Process, end_all, part_error
from streamrl.ops.launch.up import up
from streamrl.ops.monitor.doctor.requirements import check_packages, needs_of_redis
from streamrl.ops.monitor.doctor.trials import REWARD_TRIALS, run_trials
from streamrl.terminal import printable


def run_showcase(case: Showcase, overrides: Sequence[str], *, as_json: bool) -> int:
    """Run a demonstration and return the exit code. The user's `overrides` win."""
    began = time.monotonic()
    # One thread per process: as many processes are busy as there are cores, and more threads would only wait for each
    # other. Everything to load is in folders made here.
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    console = Console(stderr=as_json, highlight=False)
    for line in case.explanation:
        console.print(line, markup=False)
    with ExitStack() as stack:
        ahead = PartsAhead(stack)
        loaded, is_tried = _prepare(case, overrides, console, ahead)
        prepare_s = time.monotonic() - began
        outcome = up(loaded, display=Display(console), is_tried=is_tried, ahead=ahead)
    summary = outcome.summary
    if summary is None or summary.state != "finished":
        console.print(f"The {case.name} was ended before it had finished; it starts from the beginning next time.")
        return outcome.exit_code
    total_s = time.monotonic() - began
    report = make_report(loaded.config, case, summary, prepare_s=prepare_s, total_s=total_s)
    console.print()
    for line in report_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    return outcome.exit_code


def _prepare(case: Showcase, overrides: Sequence[str], console: Console, ahead: PartsAhead) -> tuple[Loaded, bool]:
    """Return the configuration, with everything made that it names; and whether it was tried."""
    file = shipped_config(f"{case.name}.yaml")
    loaded = load_config(file, overrides)
    check_config(loaded.config, loaded.origin)
    plot = Need(what=f"the {case.name}'s plot", packages=("matplotlib",), extra="monitor")
    check_packages(loaded.config, also=[*needs_of_redis(loaded.config), plot])
    config = loaded.config
    case.check(config)
    with only_one(config.folder, config.name):
        if clear(config.folder, what=case.name):
            console.print(f"Starting from the beginning: removed the earlier contents of {config.folder}.")
        trials = Trials(file, overrides, console=console)
        with spinner(console) as show:
            settings = case.prepare(config, show, trials.undergo, ahead)
    return load_config(file, (*settings, *overrides)), trials.are_made


class Trials:
    """Trials of a run whose model is still being made: of its rewards and its environment, which need no model.

    The learner itself reports settings it cannot use, seconds after `up` has begun; another process with its imports
    would slow down those that make the model.
    """

    def __init__(self, file: Path, overrides: Sequence[str], *, console: Console) -> None:
        self._file, self._overrides, self._console = file, overrides, console
        self.are_made = False

    def undergo(self, settings: Sequence[str]) -> None:
        """Try the run with these settings; the user's overrides win."""
        self.are_made = True
        run_trials(
            load_config(self._file, (*settings, *self._overrides)),
            report=lambda _: None,
            warn=lambda text: self._console.print(f"warning: {printable(text)}", markup=False, soft_wrap=True),
            trials=REWARD_TRIALS,
        )


def clear(folder: Path, *, what: str) -> bool:
    """Remove files of an earlier `what`; return whether there were any. ConfigError if the folder is not ours."""
    mark = f".{what}"  # marks a folder that this demonstration has made, and so may clear
    left = [path for path in folder.iterdir() if path.name != LOCK] if folder.is_dir() else []
    if left and not (folder / mark).exists():
        raise ConfigError(f"{folder} holds files that are not from a {what}; choose another name with name=...")
    for path in left:
        if path.name == mark:
            continue  # a clearing that is cut short can be done again
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    return bool(left)


_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2
_LOOKED_AT = 200  # lines of the log to search


def program(name: str, words: Sequence[str], options: Mapping[str, object], *, logs: Path) -> Command:
    """Return the command for Python with these arguments, and each option as `--option=value`."""
    arguments = [*words, *(f"{option}={value}" for option, value in options.items())]
    log = logs / f"{name.replace(' ', '-')}.log"
    return Command(name=name, arguments=(sys.executable, *arguments), log=log)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_all(
    commands: Sequence[Command],
    show: Callable[[str], None],
    *,
    meanwhile: Callable[[], None] = lambda: None,
    when_one_has_ended: Callable[[], None] = lambda: None,
    start: Callable[[Command], Process] = Process,
) -> None:
    """Run commands side by side until all have ended.

    Calls `meanwhile` once they have started, and `when_one_has_ended` when a core becomes free. UserError or PartError
    when one fails; none is left running.
    """
    processes: list[Process] = []
    try:
        processes += map(start, commands)
        meanwhile()
        _wait(processes, show, when_one_has_ended)
    finally:
        end_all(processes, within_s=0.0)


def _wait(processes: Sequence[Process], show: Callable[[str], None], when_one_has_ended: Callable[[], None]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    has_one_ended = False
    while True:
        codes = [process.poll() for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code not in (None, 0):
                raise part_error(process)
        if all(code == 0 for code in codes):
            return
        if 0 in codes and not has_one_ended:
            has_one_ended = True
            when_one_has_ended()
        if time.monotonic() > deadline:
            raise PartError(f"the preparation took more than {_TIMEOUT_S:g} s; see {processes[0].command.log.parent}")
        show("   ".join(f"{process.command.name}: {_step(process)}" for process in processes))
        time.sleep(_LOOK_EVERY_S)


def _step(process: Process) -> str:
    """Return the last step that it has logged; libraries in it may log more, such as a progress bar."""
    if process.poll() == 0:
        return "done"
    steps = [line for line in process.last_words(num_lines=_LOOKED_AT) if line.startswith("step")]
    return steps[-1].partition(": ")[0] if steps else "under way"
