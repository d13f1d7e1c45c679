"""`streamrl config show|check`: what a configuration amounts to, and whether it can run; without Redis.
`streamrl doctor`: whether it can run here, and what would make it slow."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from streamrl.config.check import check_config
from streamrl.config.load import dump_config, load_config
from streamrl.config.places import check_files
from streamrl.extras import is_installed
from streamrl.ops.cli.arguments import takes_config, takes_json, try_out
from streamrl.protocol.transport.address import masked
from streamrl.terminal import printable


@click.group()
def config() -> None:
    """Show or check a configuration."""


@config.command()
@takes_config
@takes_json
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every setting as the run would have it; what is not a default says where it was written."""
    loaded = load_config(file, overrides)
    config = loaded.config
    text = json.dumps(config.model_dump(mode="json")) if as_json else dump_config(config, loaded.origin)
    click.echo(masked(text.rstrip("\n")))


@config.command()
@takes_config
@click.option("--no-files", is_flag=True, help="Check settings only, not that data and models are there.")
def check(file: str, overrides: tuple[str, ...], no_files: bool) -> None:
    """Check settings against each other, then files, then whether rewards can score and the learner can read them.

    As `up` does before it starts. What needs no model takes no second. Then each reward function scores a row of the
    data, within the limits that workers give it, and prompts are read with the model's tokenizer: some seconds more.
    """
    loaded = load_config(file, overrides)
    check_config(loaded.config, loaded.origin)
    if not no_files:
        check_files(loaded.config)
        if is_installed("torch", "transformers"):  # else the learner is elsewhere, and what it needs too
            from streamrl.ops.monitor.doctor.musts import check_learning

            check_learning(loaded.config)
        try_out(loaded)
    click.echo(f"{file}: good" + (" (files were not looked at)" if no_files else ""))


_LEVELS = {"ok": ("ok     ", 0), "warning": ("warning", 3), "error": ("ERROR  ", 2)}  # mark, exit code


@click.command()
@takes_config
@takes_json
@click.option("--ask-services", is_flag=True, help="Ask reward services for a score, too, which may cost money.")
def doctor(file: str, overrides: tuple[str, ...], as_json: bool, ask_services: bool) -> int:
    """Look at everything that a run needs before it is started; change nothing.

    \b
        streamrl doctor conf/quickstart.yaml
        streamrl doctor conf/reinforce.yaml model.path=./sft data.train=prompts.jsonl redis.url=redis://host:6379

    \b
    Settings and files; Redis: version, policy, memory, durability, latency; model, tokenizer and vocabulary;
    reward services; packages, GPUs and drivers; memory of learner and worker (estimated), shared memory, disk, limits.
    Last, in some seconds: each reward function on a row of the data; losses of yours; all prompts with the model's own
    tokenizer; the model without its weights, and its LoRA targets.

    \b
    Exits with 0 when nothing is wrong, 2 with an error, 3 with warnings only.
    --json prints {worst, findings [{name level evidence remedy}]}; level is ok, warning or error.
    """
    from streamrl.ops.monitor.doctor import examine

    worst = "ok"
    told = []
    for finding in examine(load_config(file, overrides), ask_services=ask_services):
        told.append(asdict(finding))
        worst = max(worst, finding.level, key=list(_LEVELS).index)
        if not as_json:
            click.echo(printable(f"{_LEVELS[finding.level][0]}  {finding.name:<18} {finding.evidence}"))
            if finding.remedy:
                click.echo(printable(f"{'':<28}{finding.remedy}"))
    if as_json:
        click.echo(json.dumps({"worst": worst, "findings": told}, indent=2))
    return _LEVELS[worst][1]
