"""What the quickstart says in the end: how much was learnt, how that looks, and that nothing got lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.launch.summary import History, Summary, read_lines, summary_lines
from streamrl.quickstart.plot import HELD_OUT_MARK, TRAIN_MARK, Points, save_png, terminal_plot

SOURCE = "exact"  # the reward source that says whether an answer is right
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    prompt: str
    answer: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    summary: Summary
    before: float  # share of right answers on the held-out prompts
    after: float
    train: Points
    held_out: Points
    completions: tuple[Completion, ...]
    plot: Path
    prepare_s: float
    total_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary.to_json(),
            "before": self.before,
            "after": self.after,
            "rise": self.after - self.before,
            "completions": [asdict(completion) for completion in self.completions],
            "plot": str(self.plot),
            "prepare_s": round(self.prepare_s, 1),
            "total_s": round(self.total_s, 1),
        }


def make_report(folder: Path, summary: Summary, *, prepare_s: float, total_s: float) -> Report:
    """Of a run that has finished; draws the PNG."""
    history = History.read(folder)
    train = [(r["step"], r[f"train_rollouts/rewards/{SOURCE}"]) for r in history.steps]
    held_out = [(r["step"], r[f"val_rollouts/rewards/{SOURCE}"]) for r in history.validations]
    plot = folder / "plot.png"
    save_png(plot, train, held_out)
    before, after = summary.held_out[SOURCE]
    return Report(
        summary=summary,
        before=before,
        after=after,
        train=train,
        held_out=held_out,
        completions=_completions(folder),
        plot=plot,
        prepare_s=prepare_s,
        total_s=total_s,
    )


def _completions(folder: Path) -> tuple[Completion, ...]:
    """Held-out prompts as the first and the last validation answered them; those that changed come first."""
    validations = list(read_lines(folder / "validation.jsonl"))
    after = {sample["prompt"]: sample["completion"] for sample in validations[-1]["samples"]}
    pairs = [
        Completion(
            prompt=sample["prompt"],
            answer=str(sample["fields"]["answer"]),
            before=sample["completion"],
            after=after[sample["prompt"]],
        )
        for sample in validations[0]["samples"]
        if sample["prompt"] in after
    ]
    return tuple(sorted(pairs, key=lambda pair: pair.before == pair.after)[:_NUM_SHOWN])


def report_lines(report: Report) -> Iterator[str]:
    rise = report.after - report.before
    yield f"Right answers on held-out prompts: {report.before:.1%} before, {report.after:.1%} after ({rise:+.1%})"
    yield ""
    yield from terminal_plot(report.train, report.held_out)
    yield f"      {HELD_OUT_MARK} held-out prompts"
    yield f"      {TRAIN_MARK} trained groups (those that are all right or all wrong are dropped)"
    yield ""
    yield f"{'prompt':<12}{'right answer':<16}{'before':<16}{'after':<16}"
    for one in report.completions:
        verdicts = (f"{text} {'✓' if text == one.answer else '✗'}" for text in (one.before, one.after))
        yield f"{one.prompt:<12}{one.answer:<16}" + "".join(f"{verdict:<16}" for verdict in verdicts).rstrip()
    yield ""
    for name, value in summary_lines(report.summary):
        yield f"{name:<18}{value}"
    yield f"{'plot':<18}{report.plot}"
    yield f"{'took':<18}{report.total_s:.0f} s, {report.prepare_s:.0f} s of them for data, warm-up and reward model"
