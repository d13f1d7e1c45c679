"""What a curriculum saves: tokens generated until the quickstart's model answers 0.9 of held-out prompts correctly.

    runs (data x curriculum x seed, saved in runs/bench as they finish) ─► ratios per seed ─► bars

Of three equal datasets one is learnable, one is already easy, and one has wrong answers; or all rows are in one unnamed
file. All runs of a seed share the prompts and the initial weights. Where all rows are learnable there is little to
gain, and whether something is lost takes many seeds to see: the ratio of one seed has a standard deviation of 0.1.

The learner's own code orders the prompts and keeps their statistics; the loop around it is bench.curriculum_task's. An
interrupted bench resumes with the missing runs. Nothing is timed, so it may run beside other load. The first run makes
the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import torch
import transformers

from bench.curriculum_task import FITTING, MIXED, UNNAMED, Run, Task, Trainer, make_model
from bench.measure import Say
from bench.report import Bar, Fact, Line
from bench.resume import Done, commit_of
from bench.staleness import Estimate

_FOLDER = Path("runs/bench/curriculum")
_KINDS = (MIXED, FITTING)
_CELLS = ((MIXED, False), (MIXED, True), (FITTING, False), (FITTING, True))
_NONE_LOST = 0.03
_QUICK = Task(
    num_prompts=40,
    num_held_out=60,
    num_digits=(3, 3),
    num_demonstrations=4_000,
    max_steps=5,
    groups_per_step=4,
    max_groups=100,
    goal=0.1,
)

Found = Mapping[tuple[str, bool], Sequence[Run]]


def bench(*, quick: bool, say: Say) -> list[Line]:
    torch.set_num_threads(1)  # the matrices are too small for more threads
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    task, seeds, more = (_QUICK, range(1), range(0)) if quick else (Task(), range(5), range(5, 50))
    done = Done(_FOLDER / f"runs{'-quick' if quick else ''}.jsonl", of=f"{commit_of(Path('.'))} {task}")
    say("creating the model, if it does not exist yet")
    model = make_model(task, _FOLDER)
    found: dict[tuple[str, bool], list[Run]] = defaultdict(list)
    for (kind, on), seed in cells(seeds, more):
        name = f"{kind}, {'curriculum' if on else 'none'}, {seed}"
        if name not in done:
            done.add(name, asdict(Trainer(task, model, kind=kind, curriculum=on, seed=seed).run()))
        run = Run(**done[name])
        found[kind, on].append(run)
        reached = "reached" if run.reached else "not reached"
        say(f"{name}: {reached} after {run.tokens_to_goal:,.0f} tokens, {run.alike_to_goal:.0%} of groups alike")
    done.complete()
    return list(lines(found, task))


def cells(seeds: range, more: range) -> Iterator[tuple[tuple[str, bool], int]]:
    """Yield the runs seed by seed, so that a partial result already compares complete pairs; `more` seeds for the kind
    that needs them."""
    yield from ((cell, seed) for seed, cell in product(seeds, _CELLS))
    yield from (((UNNAMED, True), seed) for seed in seeds)
    yield from ((cell, seed) for seed, cell in product(more, _CELLS) if cell[0] == FITTING)


def lines(found: Found, task: Task) -> Iterator[Line]:
    of_tokens = f"tokens to {task.goal:g} held-out / without"
    mixed, fitting = _ratio(found, MIXED), _ratio(found, FITTING)
    yield Bar(name=f"{MIXED}: {of_tokens}", value=mixed.mean, unit="x", goal=0.6, better="lower")
    yield Fact(name=f"{MIXED}: standard error of that ratio", value=mixed.error, unit="x")
    most = fitting.mean + 2 * fitting.error
    name = f"{FITTING}: {of_tokens}, and two standard errors"
    yield Bar(name=name, value=most, unit="x", goal=1 + _NONE_LOST, better="lower")
    yield Fact(name=f"{FITTING}: {of_tokens}", value=fitting.mean, unit="x")
    yield Fact(name=f"{FITTING}: standard error of that ratio", value=fitting.error, unit="x")
    alike = float(np.mean([run.alike_to_goal for run in found[MIXED, True]]))
    yield Bar(name=f"{MIXED}: groups without variance", value=alike, unit="share", goal=0.25, better="lower")
    unnamed = _ratio(found, UNNAMED, to=MIXED)
    yield Fact(name=f"{UNNAMED}: {of_tokens}", value=unnamed.mean, unit="x")
    yield Fact(name=f"{UNNAMED}: standard error of that ratio", value=unnamed.error, unit="x")
    for kind in _KINDS:
        more = _more_in_the_end(found, kind)
        name = f"{kind}: held-out in the end, beyond none"
        yield Bar(name=name, value=more.mean, unit="", goal=min(0.0, -2 * more.error), better="higher")
    runs = [run for key in found for run in found[key]]
    reached = sum(run.reached for run in runs)
    yield Bar(name="runs that learned it", value=reached, unit="", goal=len(runs), better="higher")
    for (kind, on), some in found.items():
        name = f"{kind}, {'curriculum' if on else 'none'}"
        tokens = [run.tokens_to_goal for run in some]
        yield Fact(name=f"{name}: tokens to {task.goal:g}", value=float(np.mean(tokens)), unit="tokens")
        alike = float(np.mean([run.alike_to_goal for run in some]))
        yield Fact(name=f"{name}: groups without variance", value=alike, unit="share")
        yield Fact(name=f"{name}: held-out in the end", value=float(np.mean([run.final for run in some])), unit="share")


def _ratio(found: Found, kind: str, *, to: str = "") -> Estimate:
    """Return the ratio of tokens to the goal. `to`: compare to another kind's runs without, on the same rows."""
    pairs = zip(found[kind, True], found[to or kind, False], strict=True)
    return Estimate.of(np.array([ours.tokens_to_goal / theirs.tokens_to_goal for ours, theirs in pairs]))


def _more_in_the_end(found: Found, kind: str) -> Estimate:
    pairs = zip(found[kind, True], found[kind, False], strict=True)
    return Estimate.of(np.array([ours.final - theirs.final for ours, theirs in pairs]))
