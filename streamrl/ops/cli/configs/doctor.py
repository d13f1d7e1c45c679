"""`streamrl doctor`: check whether a configuration can run on this machine, and what would slow it down."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from streamrl.config.load import load_config
from streamrl.ops.cli.arguments import refuse, takes_config, takes_json
from streamrl.terminal import printable

if TYPE_CHECKING:
    from streamrl.config.placement import StartedPart

_MAKERS_GB = 1019 << 20  # bytes per advertised GB: for an 80 GB H100, nvidia-smi reports 81,559 MiB
_LEVELS = {"ok": ("ok     ", 0), "warning": ("warning", 3), "error": ("ERROR  ", 2)}  # mark, exit code


@click.command()
@takes_config
@click.option(
    "--for",
    "part",
    type=click.Choice(["all", "learner", "worker"]),
    default="all",
    help="Which part of the run starts here; all: what `streamrl up` starts.",
)
@takes_json
@click.option("--ask-services", is_flag=True, help="Also ask reward services for a score, which may cost money.")
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    help="Only plan a layout for a learner with this many GPUs, which need not be here.",
)
@click.option(
    "--gpu-memory", type=click.FloatRange(min=1), default=80.0, help="Memory of each GPU in GB, as advertised."
)
@click.option("--gpus-per-host", type=click.IntRange(min=1), default=8, help="GPUs per machine.")
def doctor(
    file: str, overrides: tuple[str, ...], part: StartedPart, as_json: bool, ask_services: bool, **gpus: Any
) -> int:
    """Check everything that a run needs before you start it; change nothing.

    \b
        streamrl doctor conf/quickstart.yaml
        streamrl doctor run.yaml redis.url=redis://host:6379
        streamrl doctor run.yaml --for learner       where `streamrl learn` or torchrun is started, without vLLM
        streamrl doctor run.yaml --for worker        where `streamrl worker` is, without prompts and run folder
        streamrl doctor run.yaml --gpus 32 --gpu-memory 80       which layout a learner should have there, and why

    \b
    Settings and files; Redis: version, policy, memory, durability, latency; model, tokenizer and vocabulary;
    reward services and a teacher's servers; packages, GPUs and drivers; memory of learner and worker (estimated),
    shared memory, disk, limits.
    Finally, within seconds: each reward function on a row of the data; your losses; the prompts with the model's
    tokenizer, for ten seconds per dataset at most; the model without its weights, and its LoRA targets.

    \b
    Exits with 0 when nothing is wrong, 2 with an error, 3 with warnings only.
    --json prints {worst, findings [{name level evidence remedy}]}; level is ok, warning or error.
    """
    from streamrl.ops.monitor.doctor import examine
    from streamrl.ops.monitor.doctor.trials import Planned, plan_layout

    loaded = load_config(file, overrides)
    if gpus["gpus"] is None:
        refuse("gpu_memory", "gpus_per_host", because="only with --gpus, for the layout that it plans")
        findings = examine(loaded, part, ask_services=ask_services)
    else:
        refuse("part", "ask_services", because="not with --gpus, which only plans a layout")
        memory = int(gpus["gpu_memory"] * _MAKERS_GB)
        planned = Planned(gpus=gpus["gpus"], memory=memory, per_host=gpus["gpus_per_host"])
        findings = plan_layout(loaded, planned)
    worst = "ok"
    results = []
    for finding in findings:
        results.append(asdict(finding))
        worst = max(worst, finding.level, key=list(_LEVELS).index)
        if not as_json:
            click.echo(printable(f"{_LEVELS[finding.level][0]}  {finding.name:<18} {finding.evidence}"))
            for line in finding.remedy.splitlines():
                click.echo(printable(f"{'':<28}{line}"))
    if as_json:
        click.echo(json.dumps({"worst": worst, "findings": results}, indent=2))
    return _LEVELS[worst][1]
