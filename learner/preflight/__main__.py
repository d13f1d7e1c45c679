"""Checks that the learner can read its inputs: `python -m streamrl.learner.preflight`, configuration on stdin.

python -m streamrl.learner.preflight                        all that `examine` checks, on this machine
                                     --elsewhere            without workers
                                     --hosts FEWEST MOST    on so many hosts like this one
python -m streamrl.learner.preflight --gpus 8 --memory BYTES --per-host 8     only the layout, for GPUs elsewhere
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from streamrl.config import schema
from streamrl.config.load import config_from_json
from streamrl.config.placement import StartedPart
from streamrl.errors import UserError
from streamrl.finding import Finding, error, take_stdout
from streamrl.learner.preflight.examine import examine
from streamrl.learner.preflight.memory import plan_layout


def main() -> int:
    write = take_stdout()
    try:
        arguments, config = _parse_arguments(), config_from_json(sys.stdin.read())
        for finding in _examine(config, arguments) if arguments.gpus is None else _plan(config, arguments):
            write(finding)
    except UserError as mistake:
        write(error("learner", str(mistake), ""))
    return 0


def _examine(config: schema.Config, arguments: Namespace) -> Iterator[Finding]:
    part: StartedPart = "learner" if arguments.elsewhere else "all"
    hosts = None if arguments.hosts is None else range(arguments.hosts[0], arguments.hosts[1] + 1)
    return examine(config, part, hosts)


def _plan(config: schema.Config, arguments: Namespace) -> Iterator[Finding]:
    return plan_layout(config, gpus=arguments.gpus, memory=arguments.memory, per_host=arguments.per_host)


def _parse_arguments() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--hosts", type=int, nargs=2)
    for name in ("--gpus", "--memory", "--per-host"):
        parser.add_argument(name, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
