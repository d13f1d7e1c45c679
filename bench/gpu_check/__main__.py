"""`make gpu-check`, `python -m bench.gpu_check`: runs the parts, each in its own processes; prints their table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from json import loads
from typing import NamedTuple

import click
import torch

from bench.gpu_check.rows import Outcome, Row, Scale, as_json, table
from bench.measure import Say
from bench.report import describe_machine
from streamrl.errors import StreamrlError
from streamrl.process import dying_with_us

_GRACE_S = 90.0  # for a part to end its own processes


class Part(NamedTuple):
    target: str  # module:function
    limit_s: float
    needs: Sequence[str]  # required packages
    help: str


PARTS: Mapping[str, Part] = {
    "copies": Part("copies:check", 120, (), "copy paths from the GPU to the host: pageable, pinned, asynchronous"),
    "steps": Part("steps:check", 600, ("transformers",), "MFU and peak memory of the step, against the planner"),
    "starts": Part(
        "starts:check", 240, ("transformers", "peft"), "weights on the GPU, on the host, adapters: start, step, restore"
    ),
    "head": Part("head:check", 180, (), "log-probs and their gradients, compiled against plain operations"),
    "attention": Part("attention:check", 120, (), "flash attention against the reference"),
    "publish": Part("versions:publish", 300, ("transformers", "redis"), "what the learner's loop waits for a version"),
    "reload": Part("versions:reload", 420, ("vllm",), "what an engine pauses for a version"),
    "routes": Part(
        "routes:check",
        420,
        ("vllm", "redis"),
        "a mixture of experts, trained by itself and by the routes that vLLM chose",
    ),
    "deaths": Part("deaths:check", 600, ("vllm", "redis"), "five steps of a run; kill -9 of the rank, of the worker"),
}
_HELP = """Check a machine with a GPU in half an hour: what was only calculated, measured.

\b
Parts:
{parts}

Progress, and figures as they come, go to stderr, the table to stdout. A part whose packages are missing, or that
fails, is named with the reason.
Without a GPU, or with --reduced, tiny shapes run on the CPU: that shows that the script works, and measures nothing.
Exit code 0: all parts ran; 1: some did not. A missed goal is a figure and no error. With --json the last line is one
object:

\b
  machine, parts [{{part, not_run, rows [{{what, value, unit, goal, better, note, verdict}}]}}]
"""


@click.command(
    help=_HELP.format(parts="\n".join(f"  {name:<11}{part.help}" for name, part in PARTS.items())),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("names", nargs=-1, type=click.Choice(list(PARTS)), metavar="[PART]...")
@click.option("--json", "in_json", is_flag=True, help="Print one line of JSON instead of a table.")
@click.option("--reduced", is_flag=True, help="Tiny shapes on the CPU, also where there is a GPU.")
@click.option("--here", is_flag=True, hidden=True, help="Run the one part in this process, rows as JSON lines.")
def command(names: tuple[str, ...], in_json: bool, reduced: bool, here: bool) -> None:
    reduced = reduced or not torch.cuda.is_available()
    scale = Scale(device=torch.device("cpu") if reduced else torch.device("cuda", 0))
    if here:
        _work(names[0], scale)
        return
    say, machine = Say("gpu-check"), _machine(scale)
    outcomes = []
    for name in names or PARTS:
        say(PARTS[name].help)
        outcomes.append(run_part(name, PARTS[name], reduced=reduced))
        if outcomes[-1].not_run:
            say(f"{name}: not run: {outcomes[-1].not_run}")
    click.echo(as_json(outcomes, machine) if in_json else "\n".join([machine, *table(outcomes)]))
    sys.exit(1 if any(one.not_run for one in outcomes) else 0)


def run_part(name: str, part: Part, *, reduced: bool) -> Outcome:
    missing = [package for package in part.needs if find_spec(package) is None]
    if missing:
        return Outcome(part=name, rows=(), not_run=f"{', '.join(missing)} is not installed")
    arguments = [sys.executable, "-m", "bench.gpu_check", name, "--here", *(["--reduced"] if reduced else [])]
    # Its own process group: Ctrl-C only reaches us, and we pass it on, so that the part ends its children. If it
    # comes during the start, before we know the process, the kernel signals the part when we exit.
    command = dying_with_us(arguments, by=signal.SIGINT)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=part.limit_s)
        not_run = "" if process.returncode == 0 else f"it ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        output, not_run = _stop(process), f"it took longer than {part.limit_s:g} s"
    except BaseException:
        _stop(process)
        raise
    return _outcome(name, output, not_run)


def _stop(process: subprocess.Popen[str]) -> str:
    """Stop the process; return its output."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _outcome(name: str, output: str, not_run: str) -> Outcome:
    """Parse rows from the output. Other lines come from libraries, except for the error."""
    rows = []
    for line in output.splitlines():
        if line.startswith('{"what":'):
            rows.append(Row(**loads(line)))
        elif line.startswith("error: "):
            not_run = line.removeprefix("error: ")
    return Outcome(part=name, rows=tuple(rows), not_run=not_run)


def _work(name: str, scale: Scale) -> None:
    module, _, function = PARTS[name].target.partition(":")
    say = Say(name)
    try:
        rows: Iterator[Row] = getattr(import_module(f"bench.gpu_check.{module}"), function)(scale)
        for row in rows:
            say(f"{row.what}: {row.value:.4g} {row.unit} {row.verdict}")
            print(row.to_json(), flush=True)
    except (StreamrlError, RuntimeError, OSError) as error:  # RuntimeError: CUDA errors, including out of memory
        print(f"error: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
        raise


def _machine(scale: Scale) -> str:
    if scale.is_reduced:
        return f"{describe_machine()}: reduced, on the CPU; the figures mean nothing"
    gpu = torch.cuda.get_device_properties(scale.device)
    return f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, torch {torch.__version__}; {describe_machine()}"


if __name__ == "__main__":
    command(prog_name="python -m bench.gpu_check")
