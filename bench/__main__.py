"""`python -m bench NAME`: run one bench and print its bars."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click

from bench.catalogue import BENCHES, Entry
from bench.measure import Say
from bench.report import Report, describe_machine, record, table, to_json
from streamrl.errors import StreamrlError
from streamrl.telemetry.logs import configure_logging

_HELP = """Measure one part of streamrl against a peer or a limit of this machine, in the same run.

\b
Benches:
{benches}

Progress goes to stderr, the figures to stdout. A missed bar is a figure and no error: the exit code is 0 whenever
everything could be measured. With --json the last line is one object:

\b
  bench, quick, machine {{cpu, cores, memory_gb, system, python}}
  bars   [{{name, value, unit, goal, better: higher|lower, ok}}]
  facts  [{{name, value, unit}}]                                  figures without a goal
A value is null where it could not be measured; such a bar is not ok.
"""

_QUICK_HELP = (
    "A rough answer, for most within a minute; start, proofs, distillation, curriculum, whole, peers and stale-llm "
    "take minutes."
)


def make_command(benches: Mapping[str, Entry]) -> click.Command:
    listed = "\n".join(f"  {name:<13}{entry.help}" for name, entry in benches.items())

    @click.command(help=_HELP.format(benches=listed), context_settings={"help_option_names": ["-h", "--help"]})
    @click.argument("name", type=click.Choice(list(benches)), metavar="NAME")
    @click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of a table.")
    @click.option("--quick", is_flag=True, help=_QUICK_HELP)
    @click.option("--record", "to_record", is_flag=True, help="Add a dated section to bench/RESULTS.md.")
    def command(name: str, as_json: bool, quick: bool, to_record: bool) -> None:
        configure_logging("bench", None, level="WARNING")  # to stderr: the last line of stdout is the result
        try:
            lines = benches[name].load()(quick=quick, say=Say(name))
        except StreamrlError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        report = Report(bench=name, quick=quick, machine=describe_machine(), lines=tuple(lines))
        click.echo(to_json(report) if as_json else table(report))
        if to_record:
            record(report)

    return command


if __name__ == "__main__":
    make_command(BENCHES)(prog_name="python -m bench")
