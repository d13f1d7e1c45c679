"""An evaluation's output: a table for one checkpoint, one row each for several, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.extras import need
from streamrl.recipe.held_out import completion_of

if TYPE_CHECKING:
    from streamrl.workers.engines.model import ModelFacts
    from streamrl.workers.eval_result import EvalPrompt, Result, Share

_NARROW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of one checkpoint or model."""

    name: str
    step: int | None  # None: a model
    run: Path | None  # the folder of its run; None: a model
    result: Result

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": self.name, "step": self.step, **self.result.to_json()}


def table(one: Evaluated, prompts: str) -> Iterator[str]:
    result = one.result
    yield f"{one.name} on {prompts}"
    error = "" if result.reward_error is None else f" ± {result.reward_error:.2g}"
    speed = result.num_tokens / max(result.duration_s, 1e-9)
    rows = {
        "reward": f"{_number(result.reward)}{error}",
        **{f"  {source}": _number(mean) for source, mean in result.rewards.items()},
        **_passing(result),
        "response length": f"{_number(result.response_length)} tokens",
        "ended by itself": "-" if result.finished is None else f"{result.finished:.1%}",
        "prompts answered": f"{result.num_answered} of {result.num_prompts}",
        "samples": str(result.num_samples),
        "took": f"{result.duration_s:.1f} s, {speed:.0f} tokens/s",
    }
    if result.num_failed:
        first = next(group.header.error for group in result.groups if group is not None and group.header.failed)
        rows["failed"] = f"{result.num_failed} prompts had no sample with a score; the first error: {first}"
    yield from (f"{key:<18}{value}" for key, value in rows.items())
    for name, of in result.datasets.items():
        yield f"{name}: {of.num_answered} of {of.num_prompts} prompts"
        error = "" if of.reward_error is None else f" ± {of.reward_error:.2g}"
        yield f"{'  reward':<18}{_number(of.reward)}{error}"
        yield from (f"  {key:<16}{value}" for key, value in _passing(of).items())


def _passing(result: Result) -> dict[str, str]:
    figures = {f"pass@{k}": _share(share) for k, share in result.pass_at.items()}
    return figures | ({} if result.majority is None else {"majority": _share(result.majority)})


def _share(share: Share) -> str:
    return f"{share.share:.1%} ({share.low:.1%} to {share.high:.1%})"


def comparison(several: Sequence[Evaluated], prompts: str) -> Iterator[str]:
    """Yield a row per checkpoint; for several datasets also each one's pass@1 if known, else its reward."""
    yield f"{len(several)} checkpoints on {prompts}"
    columns = [_columns(one.result) for one in several]
    heads = list(dict.fromkeys(head for one in columns for head in one))
    wide = max(len(one.name) for one in several)
    widths = [max(_NARROW, len(head), *(len(one.get(head, "-")) for one in columns)) for head in heads]
    yield " ".join(["checkpoint".ljust(wide), *(head.rjust(width) for head, width in zip(heads, widths, strict=True))])
    for one, row in zip(several, columns, strict=True):
        figures = (row.get(head, "-").rjust(width) for head, width in zip(heads, widths, strict=True))
        yield " ".join([one.name.ljust(wide), *figures])


def _columns(result: Result) -> dict[str, str]:
    error = "" if result.reward_error is None else f" ± {result.reward_error:.2g}"
    found = {"reward": f"{_number(result.reward)}{error}", **_passing(result)}
    for name, of in result.datasets.items():
        found[name] = _share(of.pass_at[1]) if of.pass_at else _number(of.reward)
    found["length"] = _number(result.response_length)
    found["answered"] = f"{result.num_answered} of {result.num_prompts}"
    return found


def check_plot(plot: Path | None) -> None:
    """ResourceError if one is wanted and cannot be made here."""
    if plot is not None:
        need("a plot", "matplotlib", extra="monitor")


def save_plot(path: Path, several: Sequence[Evaluated]) -> None:
    """Plot by step if all are steps of one run, else side by side: shares with their intervals, else rewards with two
    standard errors.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [one.step for one in several]
    by_step = None not in steps and len(set(steps)) == len(steps) and len({one.run for one in several}) == 1
    places = [step for step in steps if step is not None] if by_step else list(range(len(several)))
    if by_step:
        axes.set_xlabel("step")
    else:
        axes.set_xticks(places, [one.name for one in several], rotation=20, ha="right", fontsize=8)
    for label, points in _lines(several).items():
        known = sorted((place, *points[i]) for i, place in enumerate(places) if i in points)
        where, middle, low, high = zip(*known, strict=True)
        below = [one - end for one, end in zip(middle, low, strict=True)]
        above = [end - one for one, end in zip(middle, high, strict=True)]
        axes.errorbar(where, middle, yerr=[below, above], marker="o", capsize=3, label=label)
    passing = any(one.result.pass_at for one in several)
    axes.set_ylabel("share of prompts, 95 %" if passing else "reward, two standard errors")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)


def _lines(several: Sequence[Evaluated]) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Map each label to {checkpoint's index: (value, low, high)}."""
    lines: dict[str, dict[int, tuple[float, float, float]]] = {}
    for i, one in enumerate(several):
        for label, figure in _figures(one.result).items():
            lines.setdefault(label, {})[i] = figure
    return lines


def _figures(result: Result) -> dict[str, tuple[float, float, float]]:
    found: dict[str, tuple[float, float, float]] = {}
    for prefix, of in {"": result, **{f"{name}, ": of for name, of in result.datasets.items()}}.items():
        shares = {f"{prefix}pass@{k}": share for k, share in of.pass_at.items()}
        shares |= {} if of.majority is None else {f"{prefix}majority": of.majority}
        found |= {label: (one.share, one.low, one.high) for label, one in shares.items()}
        if not shares and of.reward is not None:
            margin = 2 * (of.reward_error or 0.0)
            found[f"{prefix}reward"] = (of.reward, of.reward - margin, of.reward + margin)
    return found


def answers(
    prompts: Sequence[EvalPrompt], result: Result, model: ModelFacts, stop: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a line of --output for each prompt."""
    for prompt, group in zip(prompts, result.groups, strict=True):
        samples = [
            {
                "completion": completion_of(sample.token_ids.tolist(), stop, model.decode),
                "token_ids": sample.token_ids.tolist(),
                "reward": sample.reward,
                "rewards": dict(sample.rewards),
                "finish_reason": sample.finish_reason,
            }
            for sample in (group.samples if group is not None else ())
        ]
        error = "not answered" if group is None else group.header.error
        line = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids.tolist(), "fields": dict(prompt.fields)}
        line |= {"dataset": prompt.dataset} if prompt.dataset else {}
        yield {**line, "error": error, "samples": samples}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
