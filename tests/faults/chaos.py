"""`python -m tests.faults.chaos`: every scenario of tests/faults in one table, judged by the independent audit.

    modules ─► pytest, each in its own process ─► rows (STREAMRL_FAULTS_REPORT) ─► runs/chaos/SET.jsonl ─► table

Finished modules of an interrupted set are not run again on the same commit. Blocks on pytest, whose own limits bound
every test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from bench.measure import Say
from bench.report import RESULTS, Machine, describe_machine
from bench.resume import Done, commit_of
from streamrl.held_folders import scratch_folder
from tests.faults.chaos_catalogue import find_modules
from tests.faults.chaos_table import FAILED, Line, ModuleResult, line_of, render
from tests.faults.judged.faults import FAULTS
from tests.faults.judged.kinds import KINDS
from tests.faults.judged.outcome import sit
from tests.faults.random_faults import Outcome, run_at_random
from tests.faults.report import VARIABLE

_ROOT = Path(__file__).parents[2]
_SETS = {"quick": "not long and not root", "full": "not root", "all": ""}  # pytest's marker expressions

_HELP = """Run what a run must survive, and print what came of it.

\b
  quick    what CI's fast tier has: minutes
  full     the long ones too: about an hour
  all      and those that need root
  random   everything at random for --minutes, from --seed
  judge    real processes, under a judge that shares no code with streamrl; runs of each --kind by turns
"""


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice([*_SETS, "random", "judge"]), default="quick")
@click.option("--minutes", default=30.0, show_default=True, help="How long, at random.")
@click.option("--seed", type=int, help="Of the order, at random; printed, so that it can be had again.")
@click.option("--kind", "kinds", type=click.Choice([*KINDS]), multiple=True, help="Judge these alone; else all.")
@click.option("--without", type=click.Choice([*FAULTS]), multiple=True, metavar="FAULT", help="Judge without this one.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of a table.")
@click.option("--fresh", is_flag=True, help="Run again what an interrupted set had finished.")
@click.option("--record", "to_record", is_flag=True, help="Add a dated section to bench/RESULTS.md.")
def main(
    what: str,
    minutes: float,
    seed: int | None,
    kinds: tuple[str, ...],
    without: tuple[str, ...],
    as_json: bool,
    fresh: bool,
    to_record: bool,
) -> None:
    say = Say("chaos")
    machine = describe_machine()
    chosen = int(time.time()) if seed is None else seed
    if what == "judge":
        sitting = sit(kinds=kinds or [*KINDS], seconds=60 * minutes, seed=chosen, without=without, say=say)
        command, shown = f"judge --minutes {minutes:g} --seed {chosen}", sitting.render()
        found = {"set": what, "seed": chosen, "machine": asdict(machine), **sitting.to_json()}
        is_ok = sitting.ok
    elif what == "random":
        outcome = _random(minutes, chosen, say)
        command, shown = f"random --minutes {minutes:g} --seed {chosen}", outcome.render()
        found = {"set": what, "machine": asdict(machine), **outcome.to_json()}
        is_ok = outcome.ok
    else:
        lines = _scenarios(what, say, fresh=fresh)
        command, shown = what, render(lines)
        found = {"set": what, "machine": asdict(machine), "scenarios": [asdict(line) for line in lines]}
        is_ok = not any(line.verdict == FAILED for line in lines)
    click.echo(json.dumps(found) if as_json else "\n".join([f"chaos {command} on {machine}", *shown]))
    if to_record:
        _record(command, machine, shown)
    sys.exit(0 if is_ok else 1)


def _random(minutes: float, seed: int, say: Say) -> Outcome:
    with scratch_folder() as folder:
        return run_at_random(folder, seconds=60 * minutes, seed=seed, say=say)


def _scenarios(name: str, say: Say, *, fresh: bool) -> list[Line]:
    modules = find_modules(_ROOT / "tests")
    wanted = sorted({path for paths in modules.values() for path in paths})
    done = Done(_ROOT / "runs" / "chaos" / f"{name}.jsonl", of=commit_of(_ROOT), fresh=fresh)
    for number, path in enumerate(wanted, 1):
        module = str(path.relative_to(_ROOT))
        if module in done:
            say(f"{number} of {len(wanted)}: {module} was done before")
            continue
        say(f"{number} of {len(wanted)}: {module}")
        result = _run(module, _SETS[name])
        done.add(module, asdict(result))
    results = {path: ModuleResult(**done[str(path.relative_to(_ROOT))]) for path in wanted}
    done.complete()
    return [
        line_of(scenario, [results[path] for path in paths], is_built=bool(paths))
        for scenario, paths in modules.items()
    ]


def _run(module: str, select: str) -> ModuleResult:
    """Run a module; pytest's output goes to stderr."""
    began = time.monotonic()
    with scratch_folder() as folder:
        rows = folder / "rows.jsonl"
        words = [sys.executable, "-m", "pytest", module, "-q", "--no-header", "-m", select]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: str(rows)}
        ended = subprocess.run(words, cwd=_ROOT, env=environment, stdout=sys.stderr, check=False)
        return ModuleResult(
            module=module,
            exit_code=ended.returncode,
            seconds=round(time.monotonic() - began, 1),
            rows=[json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else [],
        )


def _record(command: str, machine: Machine, shown: Sequence[str]) -> None:
    title = f"{datetime.now(UTC).date().isoformat()}: python -m tests.faults.chaos {command}"
    with RESULTS.open("a") as file:
        file.write("\n".join(["", f"## {title}", "", "```", f"on {machine}", *map(str.rstrip, shown), "```", ""]))


if __name__ == "__main__":
    main(prog_name="python -m tests.faults.chaos")
