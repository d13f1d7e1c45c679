"""A demonstration from its first line to its last: what it is about, preparation, the run, the report.

It begins anew each time. Ctrl-C ends it at any moment, with all that it has started.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
from rich.console import Console

from streamrl.config.check import check_config
from streamrl.config.load import Loaded, load_config
from streamrl.config.schema import Config
from streamrl.extras import need
from streamrl.launch.display import Display, spinner
from streamrl.launch.parts import RunFolder
from streamrl.launch.up import shipped_config, up
from streamrl.monitor.doctor.musts import check_packages
from streamrl.run_lock import only_one
from streamrl.showcase.folder import clear
from streamrl.showcase.report import Task, make_report, report_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Showcase:
    name: str  # of the command
    explanation: Sequence[str]
    task: Task
    check: Callable[[Config], None]  # that what it needs is here
    # Makes what the run needs, telling again and again what is going on; the settings that follow from that.
    prepare: Callable[[Config, Callable[[str], None]], list[str]]


def run_showcase(case: Showcase, overrides: Sequence[str], *, as_json: bool) -> int:
    """The exit code. What the user sets by `overrides` wins."""
    began = time.monotonic()
    # One thread a process: there are as many busy processes as cores, and threads would only wait for each other.
    # Everything that is loaded lies in folders made here.
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    console = Console(stderr=as_json, highlight=False)
    for line in case.explanation:
        console.print(line, markup=False)
    loaded = _prepare(case, overrides, console)
    prepare_s = time.monotonic() - began
    outcome = up(loaded, display=Display(console))
    summary = outcome.summary
    if summary is None or summary.state != "finished":
        console.print(f"The {case.name} was ended before it had finished; it begins anew next time.")
        return outcome.exit_code
    total_s = time.monotonic() - began
    report = make_report(loaded.config, case.task, summary, prepare_s=prepare_s, total_s=total_s)
    console.print()
    for line in report_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    return outcome.exit_code


def _prepare(case: Showcase, overrides: Sequence[str], console: Console) -> Loaded:
    """The configuration, with everything made that it names."""
    file = shipped_config(f"{case.name}.yaml")
    loaded = load_config(file, overrides)
    check_config(loaded.config, loaded.origin)
    check_packages(loaded.config)
    need(f"the {case.name}'s plot", "matplotlib", extra="monitor")
    config, folder = loaded.config, RunFolder(loaded.config.folder)
    case.check(config)
    with only_one(folder.lock, config.name):
        if clear(folder.path, what=case.name, keep=(folder.lock.name,)):
            console.print(f"Starting afresh: what was in {folder.path} is removed.")
        with spinner(console) as say:
            settings = case.prepare(config, say)
    return load_config(file, (*settings, *overrides))
