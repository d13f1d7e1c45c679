"""Accuracy of both peers: the weights they saved on their way, graded alike when the run is over.

    TRL        <folder>/snapshots/<step>/model.safetensors ─┐
    streamrl   the run's checkpoints ───────────────────────┴─► 2 x 512 answers of each, drawn by plain transformers

Held out are the numbers at which no training prompt starts; as many prompts start at trained ones, for comparison.
Answers are drawn at temperature 1, as they are trained, from the same seed for every snapshot. Accuracy is the share of
numbers in the right place, as the reward has it; its standard error is about 0.02. Takes seconds for each snapshot;
needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice, pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.peers_curve import Curve
from bench.peers_task import LONGEST, Example, examples, is_held_out, reward

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

TRL_SNAPSHOTS = "snapshots"
_NUM_PROMPTS = 512
_BATCH = 64
_SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    step: int
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What weights are worth, and what they had cost."""

    seconds: float  # since the first sample could be requested
    tokens: float  # of all answers trained on until then
    accuracy: float  # from numbers held out
    trained: float  # accuracy from others


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """A run's, in the order of their steps; between two of them it is taken to have learned evenly."""

    points: Sequence[Grade]

    def seconds_until(self, accuracy: float) -> float | None:
        """Return when it first had this accuracy; None if it never had."""
        if self.points and self.points[0].accuracy >= accuracy:
            return self.points[0].seconds
        for before, after in pairwise(self.points):
            if after.accuracy >= accuracy:
                share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
                return before.seconds + share * (after.seconds - before.seconds)
        return None

    def after(self, tokens: float) -> float:
        """Return the accuracy after this many tokens."""
        import numpy as np

        return float(np.interp(tokens, [p.tokens for p in self.points], [p.accuracy for p in self.points]))


def grade(
    model: Path,
    curve: Curve,
    snapshots: Iterable[Snapshot],
    *,
    num_prompts: int = _NUM_PROMPTS,
    max_tokens: int = LONGEST,
) -> Grades:
    """Grade the model that both began with, and each snapshot whose step the curve has."""
    grader = _Grader(model, num_prompts=num_prompts, max_tokens=max_tokens)
    points = [grader.grade({}, seconds=0.0, tokens=0)]
    costs = {step.number: cost for step, cost in zip(curve.steps, curve.costs(), strict=True)}
    for snapshot in snapshots:
        if snapshot.step in costs:
            seconds, tokens = costs[snapshot.step]
            points.append(grader.grade(snapshot.weights, seconds=seconds, tokens=tokens))
    return Grades(points=points)


def trl_snapshots(folder: Path) -> Iterator[Snapshot]:
    import safetensors.torch

    saved = [path for path in (folder / TRL_SNAPSHOTS).glob("*") if path.name.isdecimal()]
    for path in sorted(saved, key=lambda path: int(path.name)):
        yield Snapshot(step=int(path.name), weights=safetensors.torch.load_file(path / "model.safetensors"))


def streamrl_snapshots(run: Path) -> Iterator[Snapshot]:
    import safetensors.torch

    from streamrl.config.load import load_config
    from streamrl.learner.checkpoints.export import write_weights
    from streamrl.ops.cli.models.subject import checkpoints_of, find_subject

    config = load_config(run / "config.yaml", ()).config
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        for name in checkpoints_of(f"{run}@all"):
            checkpoint = find_subject(name).checkpoint
            assert checkpoint is not None, "the name is a checkpoint's"
            write_weights(config, weights, checkpoint=checkpoint)
            yield Snapshot(step=checkpoint.state.step, weights=safetensors.torch.load_file(weights))


class _Grader:
    def __init__(self, model: Path, *, num_prompts: int, max_tokens: int) -> None:
        import transformers

        self._max_tokens = max_tokens
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        drawn = (
            filter(is_held_out, examples(random.Random(_SEED))),
            filterfalse(is_held_out, examples(random.Random(_SEED))),
        )
        self._held_out, self._trained = (_batches(islice(some, num_prompts)) for some in drawn)

    def grade(self, weights: Weights, *, seconds: float, tokens: int) -> Grade:
        """Grade these weights; if there are none, the model's own."""
        if weights:
            missing = self._model.load_state_dict(weights, strict=False).missing_keys
            assert not [name for name in missing if name != "lm_head.weight"], missing  # which may be tied
        accuracy, trained = map(self._accuracy, (self._held_out, self._trained))
        return Grade(seconds=seconds, tokens=tokens, accuracy=accuracy, trained=trained)

    def _accuracy(self, batches: Sequence[Sequence[Example]]) -> float:
        import torch

        torch.manual_seed(_SEED)
        with torch.no_grad():
            return mean(share for batch in batches for share in self._shares(batch))

    def _shares(self, batch: Sequence[Example]) -> Iterator[float]:
        inputs = self._tokenizer([one.prompt for one in batch], return_tensors="pt", padding=True)
        limit = self._max_tokens
        made = self._model.generate(**inputs, max_new_tokens=limit, do_sample=True, temperature=1.0, top_k=0)
        answers = self._tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for one, answer in zip(batch, answers, strict=True):
            yield reward(one.prompt, answer, (), {"answer": one.answer})


def _batches(some: Iterable[Example]) -> list[list[Example]]:
    by_length = sorted(some, key=lambda one: len(one.answer))  # a batch takes as long as its longest answer
    return [by_length[at : at + _BATCH] for at in range(0, len(by_length), _BATCH)]
