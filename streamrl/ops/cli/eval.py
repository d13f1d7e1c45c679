"""`streamrl eval CHECKPOINT`: how good is it, on a file of prompts?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.engines import ENGINES
from streamrl.config.load import load_config
from streamrl.config.places import reward_code, reward_hosts
from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.files import scratch_folder, write_durably
from streamrl.ops.cli.arguments import MovingLine, OutputFile, takes_json, takes_overrides, tell
from streamrl.ops.cli.subject import find_subject
from streamrl.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from streamrl.learner.checkpoints.checkpoint import Checkpoint
    from streamrl.permissions import Permissions
    from streamrl.workers.evaluate import EvalPrompt, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is scored, and by which settings."""

    name: str
    config: schema.Config
    checkpoint: Checkpoint | None  # None: the model at model.path


@click.command("eval")
@click.argument("checkpoint")
@takes_overrides
@click.option("--config", "file", type=click.Path(path_type=Path), help="By default, that of the checkpoint's run.")
@click.option("--prompts", type=click.Path(), help="Prompts as JSON Lines; by default data.validation.")
@click.option("--max-prompts", type=click.IntRange(min=1), help="At most so many; by default validation.max_prompts.")
@click.option("--engine", type=click.Choice(sorted(ENGINES)), default="transformers")
@click.option("--local-reward-url", metavar="URL", help="The reward server that the configuration calls `local`.")
@click.option("--output", type=OutputFile(), help="Write prompts and answers here, JSONL.")
@takes_json
def evaluate(
    checkpoint: str,
    overrides: tuple[str, ...],
    file: Path | None,
    prompts: str | None,
    max_prompts: int | None,
    engine: str,
    local_reward_url: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Score a checkpoint, or any model, on a file of prompts.

    \b
        streamrl eval runs/mine                                  its newest checkpoint
        streamrl eval runs/mine@120        runs/mine@best        another one
        streamrl eval runs/mine/export                           what the run has exported
        streamrl eval ./sft --config conf/mine.yaml              any model folder or hub name
        streamrl eval runs/mine validation.sampling.num_samples=8 validation.sampling.greedy=false

    Samples as validation does, by validation.sampling, and scores with the rewards of the configuration: that of the
    run, or --config. Prompts are those of data.validation, or --prompts. KEY.SUB=VALUE changes a setting. It needs no
    Redis and no workers, and does not touch the run; validation.timeout_s bounds it.

    \b
    --json prints one object:
      checkpoint, step (null: a model), prompts, engine
      num_prompts, num_answered, num_failed (the rest ran out of time), num_samples, num_tokens, duration_s
      reward, reward_error (standard error over prompts), rewards {source: mean}, response_length, finished (share)

    Exits with 1 when not every prompt was answered.
    """
    chosen = [*overrides, f"worker.engine={engine}"]
    chosen += [f"data.validation={json.dumps(prompts)}"] if prompts is not None else []
    chosen += [f"validation.max_prompts={max_prompts}"] if max_prompts is not None else []
    subject = _find(checkpoint, file, chosen)
    texts = subject.config.data.validation
    if texts is None:
        raise ConfigError(
            "there are no prompts to score it on; name a file with --prompts FILE, or set data.validation"
        )
    result, asked = _evaluate(subject, local_reward_url)
    if output is not None:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in _answers(asked, result))
        write_durably(output, "".join(lines).encode())
    step = subject.checkpoint.state.step if subject.checkpoint else None
    told = {"checkpoint": subject.name, "step": step, "prompts": texts, "engine": engine, **result.to_json()}
    tell(told, _table(subject.name, texts, result), as_json=as_json)
    return 0 if result.num_answered == result.num_prompts else 1


def _table(name: str, prompts: str, result: Result) -> Iterator[str]:
    yield f"{name} on {prompts}"
    error = "" if result.reward_error is None else f" ± {result.reward_error:.2g}"
    speed = result.num_tokens / max(result.duration_s, 1e-9)
    rows = {
        "reward": f"{_number(result.reward)}{error}",
        **{f"  {source}": _number(mean) for source, mean in result.rewards.items()},
        "response length": f"{_number(result.response_length)} tokens",
        "ended by itself": "-" if result.finished is None else f"{result.finished:.1%}",
        "prompts answered": f"{result.num_answered} of {result.num_prompts}",
        "samples": str(result.num_samples),
        "took": f"{result.duration_s:.1f} s, {speed:.0f} tokens/s",
    }
    if result.num_failed:
        rows["failed"] = f"{result.num_failed} prompts had no sample with a score"
    yield from (f"{key:<18}{value}" for key, value in rows.items())


def _find(text: str, file: Path | None, overrides: Sequence[str]) -> _Subject:
    """The configuration is that of the run which it belongs to, or the one given."""
    found = find_subject(text)
    path = file or found.config_file
    if not path.is_file():
        raise ConfigError(f"{text} belongs to no run: say with --config FILE how to sample and what to reward")
    own = [] if found.checkpoint else [f"model.path={json.dumps(text)}", "model.lora=null"]
    return _Subject(name=found.name, config=load_config(path, [*overrides, *own]).config, checkpoint=found.checkpoint)


def _evaluate(subject: _Subject, local_reward_url: str | None) -> tuple[Result, list[EvalPrompt]]:
    need("an evaluation", "torch", "transformers", "safetensors", extra="learner")
    from streamrl.learner.checkpoints.export import write_weights
    from streamrl.workers.engines.model import read_model
    from streamrl.workers.evaluate import evaluate as run_evaluation
    from streamrl.workers.rewards.base import build_rewards

    config = subject.config
    check_config(config)
    configure_logging("eval", None, quiet=True)
    rewards = build_rewards(config.rewards, permissions(config), local_reward_url)
    model = read_model(config.model.path, trust_remote_code=False)
    prompts = _read_prompts(config, model.tokenizer)
    with scratch_folder() as folder:
        weights = folder / "weights.safetensors"
        write_weights(config, weights, checkpoint=subject.checkpoint)
        step = subject.checkpoint.state.step if subject.checkpoint else 0
        line = MovingLine()

        def show(num_done: int) -> None:
            line.show(f"{num_done} of {len(prompts)} prompts")

        work = run_evaluation(
            prompts, config=config, model=model, weights=weights, step=step, rewards=rewards, show=show
        )
        result = asyncio.run(work)
        line.end()
    return result, prompts


def _read_prompts(config: schema.Config, tokenizer: Any) -> list[EvalPrompt]:
    from streamrl.learner.groups.prompts import tokenise
    from streamrl.workers.evaluate import EvalPrompt

    assert config.data.validation is not None, "asked before"
    found = tokenise(config.data.validation, tokenizer, config.data, key="data.validation")
    rows = found[: config.validation.max_prompts]
    return [EvalPrompt(text=row.text, token_ids=row.token_ids, fields=row.fields) for row in rows]


def permissions(config: schema.Config) -> Permissions:
    """Whoever starts this has named the configuration: what that names is their word."""
    from streamrl.permissions import Permissions

    return Permissions(reward_code=tuple(reward_code(config)), hosts=tuple(reward_hosts(config)))


def _answers(prompts: Sequence[EvalPrompt], result: Result) -> Iterator[dict[str, Any]]:
    for prompt, group in zip(prompts, result.groups, strict=True):
        samples = [
            {
                "reward": sample.reward,
                "rewards": dict(sample.rewards),
                "finish_reason": sample.finish_reason,
                "token_ids": sample.token_ids.tolist(),
            }
            for sample in (group.samples if group is not None else ())
        ]
        error = "not answered in time" if group is None else group.header.error
        yield {"prompt": prompt.text, "fields": dict(prompt.fields), "error": error, "samples": samples}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
