"""`streamrl quickstart`: make a small model, and watch it learn on this machine."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.config.load import Loaded


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, in the last line.")
def quickstart(overrides: tuple[str, ...], as_json: bool) -> int:
    """Make a small model and train it by reinforcement learning, with all that a large run has, in some minutes.

    It begins anew each time. `seed=2` gives other data, another warm-up and another run; conf/quickstart.yaml has the
    settings.
    """
    from rich.console import Console

    from streamrl.launch.display import make_display
    from streamrl.launch.up import up
    from streamrl.quickstart.report import make_report, report_lines
    from streamrl.quickstart.task import EXPLANATION

    began = time.monotonic()
    # One thread a process: there are as many busy processes as cores, and threads would only wait for each other.
    # Everything that is loaded lies in folders made here.
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    console = Console(stderr=as_json, highlight=False)
    for line in EXPLANATION:
        console.print(line, markup=False)
    loaded = _prepare(overrides, console)
    prepare_s = time.monotonic() - began
    outcome = up(loaded, display=make_display(console))
    summary = outcome.summary
    if summary is None or summary.state != "finished":
        console.print("The quickstart was ended before it had finished; it begins anew next time.")
        return outcome.exit_code
    report = make_report(loaded.config.folder, summary, prepare_s=prepare_s, total_s=time.monotonic() - began)
    console.print()
    for line in report_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    return outcome.exit_code


def _prepare(overrides: tuple[str, ...], console: Console) -> Loaded:
    """The configuration, with everything made that it names. What the user sets wins."""
    from streamrl.config.check import check_config
    from streamrl.config.load import load_config
    from streamrl.extras import need
    from streamrl.launch.display import spinner
    from streamrl.launch.parts import RunFolder
    from streamrl.launch.preflight import check_packages, only_one
    from streamrl.launch.up import shipped_config
    from streamrl.quickstart import prepare

    file = shipped_config("quickstart.yaml")
    loaded = load_config(file, overrides)
    check_config(loaded.config, loaded.origin)
    check_packages(loaded.config)
    need("the quickstart's plot", "matplotlib", extra="monitor")
    config, folder = loaded.config, RunFolder(loaded.config.folder)
    with only_one(folder.lock, config.name):
        if prepare.clear(folder.path, keep=(folder.lock.name,)):
            console.print(f"Starting afresh: what was in {folder.path} is removed.")
        with spinner(console) as say:
            prepare.prepare(folder.path, seed=config.seed, say=say)
    return load_config(file, (*prepare.overrides(folder.path), *overrides))
