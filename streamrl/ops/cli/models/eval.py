"""`streamrl eval CHECKPOINT...`: score checkpoints or models on one or more files of prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from streamrl.config import schema
from streamrl.config.engines import ENGINES
from streamrl.config.load import as_overrides
from streamrl.config.logged import needed_for
from streamrl.config.places import granted
from streamrl.data.prompts import read_prompts
from streamrl.errors import StreamrlError
from streamrl.files import write_durably
from streamrl.held_folders import scratch_folder
from streamrl.ops.cli.arguments import MovingLine, OutputFile, print_result, takes_json
from streamrl.ops.cli.models.eval_output import Evaluated, answers, check_plot, comparison, save_plot, table
from streamrl.ops.cli.models.eval_subjects import EvalSubject, check_subject, find_subjects
from streamrl.ops.launch.processes import part_error
from streamrl.ops.launch.reward_part import RewardPart, reward_server
from streamrl.tasks import run_beside
from streamrl.telemetry.logs import configure_logging
from streamrl.terminal import printable

if TYPE_CHECKING:
    from streamrl.workers.engines.model import ModelFacts
    from streamrl.workers.eval_result import Answers, EvalPrompt
    from streamrl.workers.rewards.mixing import Rewards

_LOOK_EVERY_S = 0.2
_GRACE_S = 5.0  # in addition to the reward's request timeout


@click.command("eval")
@click.argument("words", nargs=-1, required=True, metavar="CHECKPOINT... [KEY.SUB=VALUE]...")
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help="Configuration; default: that of the checkpoint's run."
)
@click.option("--prompts", type=click.Path(), help="Prompts as JSON Lines; default: data.validation.")
@click.option("--max-prompts", type=click.IntRange(min=1), help="Limit on prompts; default: validation.max_prompts.")
@click.option("--engine", type=click.Choice(sorted(ENGINES)), default="transformers")
@click.option(
    "--local-reward-url",
    metavar="URL",
    help="Server to use for what the configuration calls `local`; default: start one.",
)
@click.option(
    "--patience-s",
    type=click.FloatRange(min=0),
    default=10.0,
    help="How long a reward may be unreachable at the start; later the source's outage_s applies.",
)
@click.option("--output", type=OutputFile(), help="Write prompts and answers to this file, as JSON Lines.")
@click.option("--plot", type=OutputFile(suffix=".png"), help="Plot the results of several checkpoints to this PNG.")
@takes_json
def evaluate(
    words: tuple[str, ...],
    file: Path | None,
    prompts: str | None,
    max_prompts: int | None,
    engine: str,
    local_reward_url: str | None,
    patience_s: float,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Score one or several checkpoints or models on a file of prompts; several give a table and a plot.

    \b
        streamrl eval runs/mine                                  its newest checkpoint
        streamrl eval runs/mine@120        runs/mine@best        another one
        streamrl eval runs/mine/export                           what the run has exported
        streamrl eval ./sft --config conf/mine.yaml              any model folder or hub name
        streamrl eval runs/mine validation.sampling.num_samples=8 validation.sampling.greedy=false
        streamrl eval runs/mine@all --plot steps.png             all that it keeps, one after another
        streamrl eval runs/a@best runs/b@best ./sft --config conf/mine.yaml

    Samples like validation (validation.sampling) and scores with the rewards of the configuration: the run's, or
    --config, without which runs that differ in prompts, sampling or rewards are refused. A checkpoint's model is always
    its run's. Prompts are those of data.validation, or --prompts; several datasets are reported by name.
    validation.pass_by adds pass@k, majority vote and intervals. KEY.SUB=VALUE overrides a setting. It needs no Redis or
    workers; validation.timeout_s limits it. The configuration's own reward server is started and stopped with it.

    \b
    --json prints one object:
      checkpoint, step (null: a model), prompts, engine
      num_prompts, num_answered, num_failed (the rest ran out of time, or into an error)
      num_samples, num_tokens, duration_s
      reward, reward_error (standard error over prompts), rewards {source: mean}, response_length, finished (share)
      pass_at {k: {share, low, high}}, majority {share, low, high}: where validation.pass_by and .answer are set
      datasets {name: as above}: where data.validation names several
    of several checkpoints: checkpoints [as above]
    --output has a line a prompt:
      prompt, prompt_token_ids, fields, error; of several datasets also dataset, of several checkpoints checkpoint
      samples [{completion, token_ids, reward, rewards {source: reward}, finish_reason}]

    Exits with 1 when not every prompt was answered. What is known when a reward or the engine fails for good, or at
    Ctrl-C, is printed and written all the same; of several checkpoints, one that its run removes is left out.
    """
    options = {"worker.engine": engine, "data.validation": prompts, "validation.max_prompts": max_prompts}
    given = as_overrides({key: value for key, value in options.items() if value is not None})
    subjects = find_subjects(words, file, given, local_reward_url=local_reward_url)
    check_plot(plot)
    done, lines, error = _evaluate_all(subjects, local_reward_url, patience_s)
    if error and not done:
        raise error
    try:
        _write(output, lines)
        _plot(plot, done)
    finally:  # hours of work must not end without its results
        _print_results(done, subjects[0].config, engine, several=len(subjects) > 1, as_json=as_json)
    if error:
        raise error
    return 0 if all(each.result.num_answered == each.result.num_prompts for each in done) else 1


def _write(output: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if output is not None:
        write_durably(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def _plot(plot: Path | None, done: Sequence[Evaluated]) -> None:
    if plot is not None:
        save_plot(plot, done)


def _evaluate_all(
    subjects: Sequence[EvalSubject], local_reward_url: str | None, patience_s: float
) -> tuple[list[Evaluated], list[dict[str, Any]], StreamrlError | KeyboardInterrupt | None]:
    """Evaluate all subjects; return the results, a line per prompt of each, and the error that ended it, if any.

    An error keeps the results so far, those of the subject's answered prompts included. A checkpoint that its run
    removes meanwhile costs the others nothing. All are checked before the first is loaded.
    """
    done: list[Evaluated] = []
    lines: list[dict[str, Any]] = []
    gone: StreamrlError | KeyboardInterrupt | None = None
    for subject, config in [(each, check_subject(each, local_reward_url)) for each in subjects]:
        try:
            found, model, error = _evaluate(subject, config, local_reward_url, patience_s)
        except (StreamrlError, KeyboardInterrupt) as early:
            if not subject.is_gone or len(subjects) == 1:
                return done, lines, early
            click.echo(f"{printable(subject.name)} is left out: {printable(str(early))}", err=True)
            gone = gone or early
            continue
        step, result = subject.checkpoint.state.step if subject.checkpoint else None, found.result()
        done.append(Evaluated(name=subject.name, step=step, run=subject.run, result=result))
        label = {"checkpoint": subject.name} if len(subjects) > 1 else {}
        lines += [label | line for line in answers(found.prompts, result, model, config.validation.sampling.stop)]
        if error is not None:
            return done, lines, error
    return done, lines, gone


def _print_results(
    done: Sequence[Evaluated], config: schema.Config, engine: str, *, several: bool, as_json: bool
) -> None:
    files = [named.dataset.place for named in config.data.validation_sets()]
    settings = {"prompts": files[0] if len(files) == 1 else files, "engine": engine}
    if not several:
        print_result(done[0].to_json() | settings, table(done[0], ", ".join(files)), as_json=as_json)
    else:
        results = {"checkpoints": [each.to_json() for each in done], **settings}
        print_result(results, comparison(done, ", ".join(files)), as_json=as_json)


def _evaluate(
    subject: EvalSubject, config: schema.Config, local_reward_url: str | None, patience_s: float
) -> tuple[Answers, ModelFacts, StreamrlError | KeyboardInterrupt | None]:
    """Evaluate one subject; returns its answers, with the error that ended it before all were there."""
    from streamrl.workers.eval_result import Answers
    from streamrl.workers.evaluate import evaluate as run_evaluation
    from streamrl.workers.rewards.build import build_rewards

    configure_logging("eval", None, quiet=True)
    line = _ProgressLine()
    with ExitStack() as stack:
        stack.callback(line.end)
        server = None
        if config.reward_server is not None:
            server = stack.enter_context(reward_server(config.reward_server, notify=line.notice, show=line.show))
        url = server.url if server is not None else local_reward_url
        build = partial(build_rewards, config.rewards, granted(config), url, needed_for=needed_for(config))
        _try_rewards(config, build(), patience_s, line)
        line.show("load the model")
        model, prompts, weights = _load(subject, config, stack.enter_context(scratch_folder()), line.notice)
        rewards, answered = build(), Answers(prompts, config=config, model=model)
        line.show("start the engine")
        work = run_evaluation(
            answered,
            config=config,
            model=model,
            weights=weights,
            step=subject.checkpoint.state.step if subject.checkpoint else 0,
            rewards=rewards,
            permissions=granted(config),
            show=line.counter(len(prompts), rewards),
        )
        companions = {"reward server": _supervise(server)} if server is not None else {}
        try:
            asyncio.run(run_beside(work, companions))
        except (StreamrlError, KeyboardInterrupt) as error:
            if not answered:
                raise
            return answered, model, error
        return answered, model, None


class _ProgressLine:
    """Progress on a terminal, and notices that are printed once."""

    def __init__(self) -> None:
        self._line = MovingLine()
        self._noticed: set[str] = set()
        self.show, self.end = self._line.show, self._line.end

    def notice(self, text: str, *, about: str = "") -> None:
        """Print a notice once; `about` identifies it if its text may vary."""
        if (about or text) not in self._noticed:
            self._noticed.add(about or text)
            self.end()
            click.echo(printable(text), err=True)

    def counter(self, num_prompts: int, rewards: Rewards) -> Callable[[int], None]:
        def show(num_done: int) -> None:
            unwell = "".join(f"; reward {name!r}: {state}" for name, state in rewards.unwell().items())
            self.show(f"{num_done} of {num_prompts} prompts{unwell}")
            if (outage := rewards.outage()) is not None:
                self.notice(f"a reward is unavailable, and samples wait for their scores: {outage}", about="outage")

        return show


def _try_rewards(config: schema.Config, rewards: Rewards, patience_s: float, line: _ProgressLine) -> None:
    """Send a first request to each reward, with the first prompt."""
    from streamrl.workers.evaluate import try_rewards
    from streamrl.workers.rewards.base import ScoreItem

    if not config.rewards:  # the environment provides them
        return
    named = config.data.validation_sets()[0]
    row = read_prompts(named.dataset, malformed=config.data.malformed, key=named.key).rows[0]
    # Some services refuse an empty completion; the prompt's text serves as one.
    item = ScoreItem(prompt=row.plain, completion=row.plain, token_ids=np.zeros(1, dtype=np.int32), fields=row.fields)
    # A function whose process dies is retried once.
    limits = [one.timeout_s * (1 + (not isinstance(one, schema.HttpReward))) for one in config.rewards.values()]
    trying = try_rewards(
        rewards,
        item,
        num_samples=config.validation.sampling.num_samples,
        patience_s=patience_s,
        limit_s=max(limits) + _GRACE_S,
        show=line.show,
        notice=line.notice,
    )
    asyncio.run(trying)


async def _supervise(server: RewardPart) -> None:
    while True:
        server.look()
        if server.supervised.has_given_up:
            raise part_error(server.supervised.process)
        await asyncio.sleep(_LOOK_EVERY_S)


def _load(
    subject: EvalSubject, config: schema.Config, folder: Path, notice: Callable[[str], None]
) -> tuple[ModelFacts, list[EvalPrompt], Path]:
    from streamrl.learner.checkpoints.export import write_weights
    from streamrl.workers.engines.model import read_model

    model = read_model(config.model.path, trust_remote_code=False)
    prompts = _read_prompts(config, model.tokenizer, notice)
    weights = folder / "weights.safetensors"
    write_weights(config, weights, checkpoint=subject.checkpoint)
    return model, prompts, weights


def _read_prompts(config: schema.Config, tokenizer: Any, notice: Callable[[str], None]) -> list[EvalPrompt]:
    from streamrl.learner.groups.prompts import read_held_out
    from streamrl.workers.eval_result import EvalPrompt

    rows = read_held_out(config, tokenizer, notice=notice)
    return [EvalPrompt(text=row.text, token_ids=row.token_ids, fields=row.fields, dataset=row.dataset) for row in rows]
