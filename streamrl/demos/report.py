"""A demonstration's final report: how much was learned, examples, and that nothing was lost.

Also plots a run's curve as text, for the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.config.schema import Config, Dataset
from streamrl.data.prompts import read_prompts
from streamrl.errors import ResourceError
from streamrl.ops.launch.forking import PartsAhead
from streamrl.ops.launch.summary import RunSummary, summary_lines
from streamrl.ops.monitor.charts import Chart, running_mean, save_report
from streamrl.ops.monitor.history import History, read_lines
from streamrl.terminal import printable

_NUM_SHOWN = 3
_MAX_CELL = 40  # characters per text in the table
_SPACES = 4


# Tries everything in a run with these settings that needs no model; UserError for anything that would fail.
Trial = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Showcase:
    name: str  # the command's
    explanation: Sequence[str]
    # Judging and showing answers.
    source: str  # the reward source that decides whether an answer is right
    question: Callable[[str, Mapping[str, Any]], str]  # (prompt, its further fields) -> the question for display
    is_right: Callable[[str, Mapping[str, Any]], bool]  # (completion, the prompt's further fields)
    # Preparation.
    check: Callable[[Config], None]  # raises if a requirement is missing
    # Makes what the run needs, with frequent progress messages; returns the settings that depend on it.
    prepare: Callable[[Config, Callable[[str], None], Trial, PartsAhead], list[str]]
    prepared: str  # what it made, for display


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    prompt: str
    answer: str
    before: str
    after: str
    before_is_right: bool
    after_is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Distinct prompts in the files that the run has read."""

    to_train: int
    held_out: int
    in_both: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    summary: RunSummary
    before: float  # share of right answers on the held-out prompts
    after: float
    train: Points
    held_out: Points
    prompts: Prompts
    completions: tuple[Completion, ...]
    plot: Path
    prepared: str
    prepare_s: float
    total_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary.to_json(),
            "before": self.before,
            "after": self.after,
            "rise": self.after - self.before,
            "prompts": asdict(self.prompts),
            "completions": [asdict(completion) for completion in self.completions],
            "plot": str(self.plot),
            "prepare_s": round(self.prepare_s, 1),
            "total_s": round(self.total_s, 1),
        }


def make_report(config: Config, case: Showcase, summary: RunSummary, *, prepare_s: float, total_s: float) -> Report:
    """Report on a finished run; draws the PNG. ResourceError if no validation had enough answers."""
    if case.source not in summary.held_out:
        raise ResourceError(
            f"the run in {config.folder} has no validation with enough answers to compare before and after "
            f"(val_rollouts/ranks): raise validation.timeout_s = {config.validation.timeout_s:g}"
        )
    history = History.read(config.folder)
    curves = {
        "trained groups, sampled (all alike: dropped)": f"train_rollouts/rewards/{case.source}",
        "held-out prompts": f"val_rollouts/rewards/{case.source}",
    }
    train, held_out = (list(zip(*history.curve(metric), strict=True)) for metric in curves.values())
    plot = config.folder / "plot.png"
    chart = Chart(name="right", title="Right answers", unit="share", series=curves)
    save_report(plot, history, title=summary.name, charts=[chart])
    before, after = summary.held_out[case.source]
    return Report(
        summary=summary,
        before=before,
        after=after,
        train=train,
        held_out=held_out,
        prompts=count_prompts(config),
        completions=_completions(config.folder, case),
        plot=plot,
        prepared=case.prepared,
        prepare_s=prepare_s,
        total_s=total_s,
    )


def count_prompts(config: Config) -> Prompts:
    [validation] = config.data.validation_sets()  # a demonstration has exactly one
    train = {text for one in config.data.train_sets() for text in _texts(one.dataset)}
    held_out = _texts(validation.dataset, at_most=config.validation.max_prompts)
    return Prompts(to_train=len(train), held_out=len(held_out), in_both=len(train & held_out))


def _texts(dataset: Dataset, *, at_most: int | None = None) -> set[str]:
    rows = read_prompts(dataset, malformed="error").rows[:at_most]
    return {row.plain + json.dumps(dict(row.fields), sort_keys=True) for row in rows}


def _completions(folder: Path, case: Showcase) -> tuple[Completion, ...]:
    """Return held-out prompts with the answers of the first and the last validation; changed answers come first."""
    validations = list(read_lines(folder / "validation.jsonl"))
    after = {_prompt_key(sample): sample["completion"] for sample in validations[-1]["samples"]}
    pairs = [
        Completion(
            prompt=case.question(sample["prompt"], sample["fields"]),
            answer=str(sample["fields"]["answer"]),
            before=sample["completion"],
            after=after[_prompt_key(sample)],
            before_is_right=case.is_right(sample["completion"], sample["fields"]),
            after_is_right=case.is_right(after[_prompt_key(sample)], sample["fields"]),
        )
        for sample in validations[0]["samples"]
        if _prompt_key(sample) in after
    ]
    return tuple(sorted(pairs, key=lambda pair: pair.before == pair.after)[:_NUM_SHOWN])


def _prompt_key(sample: Mapping[str, Any]) -> tuple[str, str]:
    """The prompt with its fields: prompts with the same text may ask different things."""
    return sample["prompt"], json.dumps(sample["fields"], sort_keys=True)


def report_lines(report: Report) -> Iterator[str]:
    rise = report.after - report.before
    yield f"Right answers on held-out prompts: {report.before:.1%} before, {report.after:.1%} after ({rise:+.1%})"
    yield ""
    yield from terminal_plot(report.train, report.held_out)
    yield f"      {HELD_OUT_MARK} held-out prompts"
    yield f"      {TRAIN_MARK} trained groups (those whose samples all have one reward are dropped)"
    yield ""
    yield from _table(report.completions)
    yield ""
    prompts = report.prompts
    facts = [
        ("prompts", f"{prompts.to_train} to train on, {prompts.held_out} held out, {prompts.in_both} in both"),
        *summary_lines(report.summary),
        ("plot", str(report.plot)),
        ("took", f"{report.total_s:.0f} s, {report.prepare_s:.0f} s of them for {report.prepared}"),
    ]
    width = max(len(name) for name, _ in facts) + 2
    yield from (f"{name:<{width}}{value}" for name, value in facts)


def _table(completions: tuple[Completion, ...]) -> Iterator[str]:
    rows = [("prompt", "right answer", "before", "after")]
    for one in completions:
        verdicts = ((one.before, one.before_is_right), (one.after, one.after_is_right))
        before, after = (f"{_cell(text)} {'✓' if is_right else '✗'}" for text, is_right in verdicts)
        rows.append((_cell(one.prompt), _cell(one.answer), before, after))
    widths = [max(map(len, column)) + _SPACES for column in zip(*rows, strict=True)]
    for row in rows:
        yield "".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _cell(text: str) -> str:
    """Fit a text on one line of limited length."""
    words = printable(" ".join(text.split()))
    return words if len(words) <= _MAX_CELL else words[: _MAX_CELL - 1] + "…"


Points = Sequence[tuple[float, float]]  # (step, share of right answers)
TRAIN_MARK, HELD_OUT_MARK = "·", "●"
_WIDTH, _HEIGHT = 66, 11


def terminal_plot(train: Points, held_out: Points, *, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Return lines of text; the axes go from 0 to the last step and from 0 to 1."""
    last = max((step for step, _ in (*train, *held_out)), default=0) or 1
    field = [[" "] * width for _ in range(height)]
    smoothed = zip((step for step, _ in train), running_mean([value for _, value in train]), strict=True)
    for points, mark in ((smoothed, TRAIN_MARK), (held_out, HELD_OUT_MARK)):
        for step, value in points:
            column = round(step / last * (width - 1))
            row = height - 1 - round(min(1.0, max(0.0, value)) * (height - 1))
            field[row][column] = mark
    lines = []
    for row, cells in enumerate(field):
        share = 1 - row / (height - 1)
        label = f"{share:4.1f}" if row % 2 == 0 else " " * 4
        lines.append(f"{label} │{''.join(cells)}".rstrip())
    steps = f"{last:.0f}"
    lines.append(f"{' ' * 4} └{'─' * width}")
    lines.append(f"{' ' * 6}0{'steps'.center(width - 1 - len(steps))}{steps}")
    return lines
