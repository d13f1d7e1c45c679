"""`streamrl reward try`: run a reward function on some rows, in a limited process as workers do; or any reward source
of a configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.config.places import SANDBOX, granted
from streamrl.data.prompts import read_prompts
from streamrl.data.settings import DATE
from streamrl.errors import ConfigError
from streamrl.ops.cli.arguments import print_result, refuse, takes_json
from streamrl.ops.cli.rewards.completions import completions_of
from streamrl.ops.cli.rewards.options import as_option
from streamrl.ops.cli.rewards.scoring import Tried, as_text, encoder_of, score_pairs
from streamrl.terminal import plural

if TYPE_CHECKING:
    from streamrl.workers.rewards.base import GroupReward, Reward
    from streamrl.workers.rewards.code import CodeReward

_CONFIGURATIONS = (".yaml", ".yml")
_MAX_SHOWN = 300  # characters per text
_PATIENCE_S = 10.0  # with a service that is out
_FILE = click.Path(path_type=Path)
_DEFAULTS = schema.FunctionReward.model_fields


@click.command("try")
@click.argument("target", metavar="FILE:FUNCTION|SOURCE|sandbox")
@click.option("--data", required=True, type=_FILE, help="Prompts as JSON Lines, or a run's .yaml: its data.train.")
@click.option("--completion", metavar="TEXT", help="Score this text for each row.")
@click.option(
    "--completions",
    type=_FILE,
    help='Score these, JSON Lines: for each row in turn a text, {"completion": text}, or a list: a group of samples.',
)
@click.option("--field", metavar="NAME", help="Score the content of this field of each row, such as the right answer.")
@click.option("--num", "num_rows", type=click.IntRange(min=1), default=5, help="Number of rows to try, from the first.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A keyword argument of the function.")
@click.option("--model", metavar="MODEL", help="Folder or hub name of the model for chat template and tokens.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS["timeout_s"].default,
    help="Time limit per call.",
)
@click.option(
    "--memory-mb",
    type=click.IntRange(min=1),
    default=_DEFAULTS["memory_mb"].default,
    help="Memory limit of the process.",
)
@click.option("--per-token", is_flag=True, help="It returns a number for each token, as with `per_token: true`.")
@click.option("--network", is_flag=True, help="Allow connections, as `network: true` does.")
@click.option("--env", "environment", multiple=True, metavar="NAME", help="Pass this variable, as `environment` does.")
@takes_json
def try_reward(
    target: str, data: Path, num_rows: int, options: tuple[str, ...], model: str | None, as_json: bool, **chosen: Any
) -> int:
    """Run a reward function on some rows, as workers do, and show its scores.

    FILE:FUNCTION is your function, in streamrl's form or TRL's; package.module:function and names of built-ins work
    too. It runs in its own process with a worker's limits; what it prints goes to stderr. SOURCE is the name of one of
    the rewards in --data RUN.YAML, with its settings there, which may be a judge or a service; one that is out is given
    up after ten seconds. A function with `of_group` reads the scores of the other rewards; services among these are not
    asked, and count as 1.

    `sandbox` is a source of type `code`: it runs each completion's program against the row's tests and shows the result
    of each. Its options are those of `tests`: field, partial, time_s, memory_mb.

    \b
        streamrl reward try my_rewards.py:near --data prompts.jsonl --field answer
        streamrl reward try my_rewards.py:near --data prompts.jsonl --completion 7 --option scale=5
        streamrl reward try my_rewards.py:near --data prompts.jsonl --completions answers.jsonl
        streamrl reward try my_rewards.py:by_token --data prompts.jsonl --completion 7 --per-token
        streamrl reward try numeric_match --data run.yaml --field answer --num 100
        streamrl reward try sandbox --data problems.jsonl --field solution --option time_s=2
        streamrl reward try helpful --data run.yaml --completions answers.jsonl

    Without --model a chat's prompt is the text of its messages, one per line, and each byte of a completion is a token.

    \b
    --json prints one object:
      target, num_failed
      rows [{line, prompt, completion, score, error, seconds}]; without score and error: the function does not apply
        of programs also tests [{passed, why, seconds}]

    Exits with 1 when a row has an error in place of a score.
    """
    settings = {name: chosen.pop(name) for name in ("per_token", "timeout_s", "memory_mb", "network", "environment")}
    dataset, date = _dataset(data)
    rows = read_prompts(dataset, malformed="error", key="--data").rows[:num_rows]
    pairs = list(zip(rows, completions_of(rows, data, **chosen), strict=False))
    encode = encoder_of(model, date) if model else as_text
    tried = asyncio.run(score_pairs(_reward(target, data, options, settings), pairs, encode))
    num_failed = sum(one.error is not None for one in tried)
    result = {"target": target, "num_failed": num_failed, "rows": list(map(_to_json, tried))}
    print_result(result, _lines(tried), as_json=as_json)
    return 1 if num_failed else 0


def _dataset(data: Path) -> tuple[schema.Dataset, str]:
    """Return the dataset, of a configuration the first that it trains on, and what chat templates take for today."""
    if data.suffix not in _CONFIGURATIONS:
        return schema.Dataset(path=str(data)), DATE
    settings = load_config(data).config.data
    return settings.train_sets()[0].dataset, settings.date


def _reward(target: str, data: Path, options: Sequence[str], settings: Mapping[str, Any]) -> Reward | GroupReward:
    """Build the reward, without starting it."""
    from streamrl.workers.rewards.build import build_reward
    from streamrl.workers.rewards.functions import FunctionReward, check_target

    config = load_config(data).config if data.suffix in _CONFIGURATIONS else None
    if config is not None and target in config.rewards:
        refuse("options", *settings, because=f"{target} takes its settings from {data}: change them there")
        source = config.rewards[target]
        if isinstance(source, schema.FunctionReward) and source.of_group:
            return _group_trial(target, config)
        if isinstance(source, schema.SERVICES):
            source = source.model_copy(update={"outage_s": min(source.outage_s, _PATIENCE_S)})
        return build_reward(target, source, granted(config), None)
    chosen = dict(map(as_option, options))
    if target == SANDBOX:
        refuse(*settings, because=f"not with {SANDBOX}, whose limits are --option time_s=... and memory_mb=...")
        return _sandbox(chosen)
    source = schema.FunctionReward(type="function", target=target, options=chosen, **settings)
    check_target(target, key="FILE:FUNCTION")
    return FunctionReward(source, key=target)


def _group_trial(target: str, config: schema.Config) -> GroupReward:
    from streamrl.workers.rewards.build import STAND_IN, GroupTrial

    trial = GroupTrial(target, config.rewards, granted(config))
    for name in trial.unasked:
        click.echo(f"{name} is not asked: {target} reads {STAND_IN:g} as its reward", err=True)
    return trial


def _sandbox(options: dict[str, Any]) -> CodeReward:
    from streamrl.workers.rewards.code import CodeReward

    try:
        source = schema.CodeReward(type="code", tests=schema.Tests(**options))
    except ValidationError as error:
        mistakes = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"--option: {mistakes}; its options are {', '.join(schema.Tests.model_fields)}") from None
    return CodeReward(source, key=SANDBOX)


def _to_json(one: Tried) -> dict[str, Any]:
    fields = asdict(one)
    return fields if one.tests else {name: value for name, value in fields.items() if name != "tests"}


def _lines(tried: Sequence[Tried]) -> Iterator[str]:
    for one in tried:
        score = "the function returned None: it does not apply" if one.score is None else f"{one.score:.6g}"
        yield f"prompt      {one.prompt[:_MAX_SHOWN]}"
        yield f"completion  {one.completion[:_MAX_SHOWN]}"
        yield f"error       {one.error}" if one.error else f"score       {score}"
        for number, test in enumerate(one.tests, start=1):
            outcome = "passed" if test["passed"] else test["why"]
            yield f"{f'test {number}':<12}{outcome}"
        yield f"took        {1000 * one.seconds:.1f} ms"
        yield ""
    scores = [one.score for one in tried if one.score is not None]
    mean = f", {sum(scores) / len(scores):.4g} on average" if scores else ""
    failed = sum(one.error is not None for one in tried)
    yield f"{plural(len(tried), 'row')}: {len(scores)} with a score{mean}; {failed} failed"
