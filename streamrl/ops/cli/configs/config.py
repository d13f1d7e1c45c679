"""`streamrl config init|show|check`: write a first configuration, show the resolved one, check it; without Redis."""

from __future__ import annotations

import json
from pathlib import Path

import click

from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.layout import refuse_layout
from streamrl.config.load import dump_config, load_config
from streamrl.config.places import EMBEDDED_REDIS
from streamrl.config.shipped import shipped_config
from streamrl.config.source import parse
from streamrl.errors import ConfigError
from streamrl.extras import is_installed
from streamrl.files import write_durably
from streamrl.ops.cli.arguments import OutputFile, run_trials, takes_config, takes_json
from streamrl.ops.cli.configs.starter import Case, is_chat_model, starter
from streamrl.protocol.transport.address import masked


@click.group()
def config() -> None:
    """Create, show or check a configuration."""


_ANSWERS = ("exact_match", "numeric_match", "math_equal")  # rewards that compare with the field `answer`


# Checked before any question is asked; a wrong answer is asked for again.
def _new_file(context: click.Context, parameter: click.Parameter, file: Path) -> Path:
    if file.exists():
        raise ConfigError(f"{file} already exists: name another file, or remove it")
    return file


def _reward(context: click.Context, parameter: click.Parameter, reward: str) -> str:
    if ":" not in reward and reward not in _ANSWERS:
        raise click.BadParameter(f"{reward}: write FILE.py:FUNCTION, or one of {', '.join(_ANSWERS)}")
    return reward


@config.command()
@click.argument("file", type=OutputFile(suffix=".yaml"), default="run.yaml", callback=_new_file)
@click.option("--model", prompt="Model: a folder, or OWNER/NAME on a hub", help="A folder, or OWNER/NAME on a hub.")
@click.option("--data", prompt="Prompts: a file of JSON Lines", help="Prompts to train on, as JSON Lines.")
@click.option("--validation", metavar="FILE", help="Held-out prompts for validation.")
@click.option(
    "--reward",
    metavar="FILE:FUNCTION|NAME",
    callback=_reward,
    prompt=f"Reward: FILE.py:FUNCTION, or {', '.join(_ANSWERS)}",
    help=f"A function of yours, or one of {', '.join(_ANSWERS)}.",
)
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="GPUs of this machine.")
@click.option(
    "--chat/--text", default=None, help="Whether prompts are messages or texts; default: as the model expects."
)
def init(file: Path, model: str, data: str, validation: str | None, reward: str, gpus: int, chat: bool | None) -> None:
    """Write a short configuration for your case, with every line explained; it asks for what you don't give.

    \b
        streamrl config init
        streamrl config init mine.yaml --model ./sft --data train.jsonl --reward numeric_match
        streamrl config init big.yaml --model Qwen/Qwen2.5-1.5B-Instruct --data train.jsonl \\
            --validation test.jsonl --reward rewards.py:score --gpus 4
    """
    chat = is_chat_model(model) if chat is None else chat
    case = Case(
        file=file,
        model=model,
        data=data,
        validation=validation,
        reward=reward,
        gpus=gpus,
        chat=chat,
    )
    text = starter(case, reference=shipped_config("reinforce.yaml"))
    loaded = load_config(parse(text, name=str(file), numbered=True).plain())
    check_config(loaded.config, loaded.origin)
    write_durably(file, text.encode())
    click.echo(f"{file}: written. Then: streamrl config check {file}")


@config.command()
@takes_config
@takes_json
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every setting as the run would use it, and where each value other than a default was set."""
    loaded = load_config(file, overrides)
    config = loaded.config
    text = json.dumps(config.model_dump(mode="json")) if as_json else dump_config(config, loaded.origin)
    click.echo(masked(text.rstrip("\n")))


@config.command()
@takes_config
@click.option("--no-files", is_flag=True, help="Check settings only, not whether data and models exist.")
def check(file: str, overrides: tuple[str, ...], no_files: bool) -> None:
    """Check settings against each other, then files, then rewards on your data.

    These are the checks that `up` makes before it starts. Those without a model take less than a second. Then each
    reward function scores a row of the data, with the limits that workers apply, and prompts are read with the model's
    tokenizer, which takes some seconds. With a redis.url that other machines reach, learner.layout may be meant for the
    ranks of several machines, and only `up` and `learn` check it.
    """
    loaded = load_config(file, overrides)
    config = loaded.config
    check_config(config, loaded.origin)
    if config.redis.url == EMBEDDED_REDIS:  # which only this machine reaches
        refuse_layout(config.learner.layout, config.learner.processes)
    if not no_files:
        check_files(config)
        if is_installed("torch", "transformers"):  # otherwise the learner, and what it needs, is on another machine
            from streamrl.ops.monitor.doctor.requirements import check_learning

            check_learning(config)
        run_trials(loaded)
    click.echo(f"{file}: good" + (" (files not checked)" if no_files else ""))
