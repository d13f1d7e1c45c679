"""Checks each ticket and each step of a run against what was seen in the streams.

    every ticket        ended at most once; ended, or still asked for, or answered and not read
    a trained ticket    was issued; a group for its own prompt, of this run, was seen
    a step              some choice of the seen groups gives exactly the metrics that it recorded: no other groups, and
                        no forged ones
    a token of these    is of an announced version, with its step, and not older than the bound

Nothing records which of several groups of a ticket was trained, so all choices are tried. The first sound one that
matches acquits the step; without one, any choice that matches shows what was wrong. Pure.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.judge.history import TRAINED, Ended, History
from tests.faults.judge.layout import Answered, Asked, Fields, UnreadableError, read_group, read_header, read_ticket
from tests.faults.judge.recorder import GROUPS, TICKETS, Record

_DROPPED = "dropped/"  # followed by the reason
_MOST_CHOICES = 20_000  # of a step's groups
_FIGURES = ("train_rollouts/rollout_size", "train_rollouts/rewards", "train_rollouts/response_lengths",
            "train_rollouts/prompt_lengths", "timers/generate")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not happen."""

    kind: str
    what: str
    ticket: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Maps ticket numbers to prompts, by the rules in docs/wire.md."""

    texts: Sequence[str]  # the prompt file's, in order
    seed: int = 0
    shuffle: bool = False
    drawn: Mapping[int, int] = field(default_factory=dict)  # by place, if the run has a curriculum

    def text_of(self, ticket: int, retries: Mapping[int, int]) -> str:
        while ticket in retries:
            ticket = retries[ticket]
        place = ticket - sum(number < ticket for number in retries)
        if self.drawn:  # numbers of another lineage, with other retries, may have no place in this one
            return self.texts[self.drawn[place]] if place in self.drawn else ""
        passes, place = divmod(place, len(self.texts))
        if not self.shuffle:
            return self.texts[place]
        raw = np.random.Philox(key=np.array([self.seed, passes], dtype=np.uint64)).random_raw(len(self.texts))
        return self.texts[int(np.argsort(raw, kind="stable")[place])]

    @staticmethod
    def drawn_in(folder: Path) -> dict[int, int]:
        """Return the row that a run's curriculum has drawn for each place; the newer of two terms counts."""
        found: dict[int, int] = {}
        for path in sorted((folder / "curriculum").glob("*.jsonl")):
            for line in path.read_text().split("\n")[1:-1]:
                block = json.loads(line)
                found |= {block["first"] + n: row for n, (_, row) in enumerate(block["asked"])}
        return found

    @staticmethod
    def read(path: Path, *, seed: int, shuffle: bool) -> Prompts:
        return Prompts(
            texts=[json.loads(line)["text"] for line in path.read_text().splitlines()], seed=seed, shuffle=shuffle
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    issued: int
    trained: int
    dropped: Mapping[str, int]
    dead: int
    outstanding: int
    steps: int  # committed
    steps_checked: int  # whose metrics were reproduced from the seen groups
    tokens_checked: int
    violations: tuple[Violation, ...]

    def count(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.violations)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of the run."""

    prompts: Prompts
    max_lag: int  # in steps; no trained token may exceed it
    forged: Collection[str] = ()  # names of entries that must not be trained


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A group that was seen for a ticket."""

    group: Answered
    flaw: str  # "": sound


@dataclass(slots=True)
class _Findings:
    violations: list[Violation] = field(default_factory=list)
    steps_checked: int = 0
    tokens_checked: int = 0

    def add(self, kind: str, what: str, *, ticket: int | None = None, step: int | None = None) -> None:
        self.violations.append(Violation(kind=kind, what=what, ticket=ticket, step=step))


def judge(history: History, record: Record, rules: Rules) -> Verdict:
    found = _Findings()
    asked = list(_readable_tickets(record))
    outcomes = Counter({ended.ticket: ended.outcome for ended in history.ended}.values())
    issued = max(history.issued, 0)
    open_now = _check_endings(history, record, found)
    _check_steps(history, record, rules, asked, found)
    return Verdict(
        issued=issued,
        trained=outcomes[TRAINED],
        dropped={
            name.removeprefix("dropped/"): n for name, n in sorted(outcomes.items()) if name.startswith("dropped/")
        },
        dead=outcomes["dead"],
        outstanding=open_now,
        steps=history.step,
        steps_checked=found.steps_checked,
        tokens_checked=found.tokens_checked,
        violations=tuple(found.violations),
    )


def _readable_tickets(record: Record) -> Iterator[Asked]:
    for seen in record.of(TICKETS):
        try:
            yield read_ticket(seen.fields)
        except UnreadableError:
            continue  # written by an intruder


def _check_endings(history: History, record: Record, found: _Findings) -> int:
    """Check the endings; return the number of open tickets."""
    endings: dict[int, list[Ended]] = defaultdict(list)
    for ended in history.ended:
        endings[ended.ticket].append(ended)
    for ticket, several in sorted(endings.items()):
        if len(several) > 1:
            kind = "twice" if all(one.outcome == TRAINED for one in several) else "contradictory"
            found.add(kind, f"ended {[(e.outcome, e.term, e.step) for e in several]}", ticket=ticket)
        if ticket >= history.issued:
            found.add("unasked", f"ended as {several[0].outcome}, and was never issued", ticket=ticket)
    num_open, final = 0, record.final
    present = None if final is None else final.open_tickets(history.cursor, history.carry)
    for ticket in range(history.issued):
        if ticket in endings:
            continue
        num_open += 1
        if history.has_resolved(ticket):
            found.add("lost", "the checkpoint says that it has ended, and no journal how", ticket=ticket)
        elif present is not None and ticket not in present:
            found.add("lost", "neither ended nor in the streams", ticket=ticket)
    return num_open


def _check_steps(history: History, record: Record, rules: Rules, asked: Iterable[Asked], found: _Findings) -> None:
    ids = _token_ids(asked, found)
    candidates: dict[int, dict[str, _Candidate]] = defaultdict(dict)
    for seen in record.of(GROUPS):
        found_group = _read(seen.fields)
        if found_group is not None and not found_group[0].failed:
            group, flaw = found_group
            if seen.name in rules.forged:
                flaw = "forged"
            candidates[group.number][seen.name] = _Candidate(group, flaw or _flaw(group, history, rules, ids))
    by_step: dict[tuple[int, int], list[int]] = defaultdict(list)
    for ended in history.ended:
        if ended.outcome == TRAINED:
            by_step[ended.term, ended.step].append(ended.ticket)
    for (term, step), tickets in sorted(by_step.items(), key=lambda one: one[0][1]):
        choices = [list(candidates[ticket].values()) for ticket in tickets]
        trained = _trained_groups(tickets, choices, history.figures.get((term, step)), step, found)
        for group in trained:
            _check_spans(group, record, rules, step, found)


def _token_ids(asked: Iterable[Asked], found: _Findings) -> Mapping[str, tuple[int, ...]]:
    """Return the token ids of each prompt that was asked for."""
    ids: dict[str, tuple[int, ...]] = {}
    for one in asked:
        if ids.setdefault(one.prompt, one.token_ids) != one.token_ids:
            found.add("prompt", "one text was asked for with different tokens", ticket=one.number)
    return ids


def _read(fields: Fields) -> tuple[Answered, str] | None:
    """Return (the group, its flaw); None if even its header is unreadable, so that nobody can train it."""
    try:
        return read_group(fields), ""
    except UnreadableError:
        pass
    try:
        return read_header(fields), "malformed"
    except UnreadableError:
        return None


def _flaw(group: Answered, history: History, rules: Rules, ids: Mapping[str, tuple[int, ...]]) -> str:
    """Return why a group that is valid in itself must not be trained."""
    if group.run_uid != history.run_uid:
        return "other run"
    text = rules.prompts.text_of(group.number, history.retries)
    if text in ids:
        return "" if ids[text] == group.prompt_ids else "prompt"
    # A ticket may come and go unseen; then all that can be checked is whether the group answers another prompt.
    return "prompt" if group.prompt_ids in ids.values() else ""


def _trained_groups(
    tickets: Sequence[int],
    choices: Sequence[Sequence[_Candidate]],
    figures: Mapping[str, float] | None,
    step: int,
    found: _Findings,
) -> list[Answered]:
    """Return the step's groups, as far as they can be determined and are sound."""
    sound = [[one for one in candidates if not one.flaw] for candidates in choices]
    for ticket, candidates, good in zip(tickets, choices, sound, strict=True):
        if not candidates:
            found.add("unrecorded", "was trained, and no group of it was ever seen", ticket=ticket, step=step)
        elif not good:
            flaws = sorted({one.flaw for one in candidates})
            found.add(flaws[0], f"was trained, and each group of it that was seen is {flaws}", ticket=ticket, step=step)
    if not all(sound):
        return []
    if figures is None:  # the learner died between its checkpoint and its record
        return [candidates[0].group for candidates in sound if len(candidates) == 1]
    if chosen := _choose(sound, figures):
        found.steps_checked += 1
        return [one.group for one in chosen]
    _accuse(tickets, choices, sound, figures, step, found)
    return []


def _accuse(
    tickets: Sequence[int],
    choices: Sequence[Sequence[_Candidate]],
    sound: Sequence[Sequence[_Candidate]],
    figures: Mapping[str, float],
    step: int,
    found: _Findings,
) -> None:
    """Report what is wrong, since no choice of sound groups gives these metrics."""
    if chosen := _choose(choices, figures):
        for ticket, one in zip(tickets, chosen, strict=True):
            if one.flaw:
                found.add(one.flaw, "was trained, as the step's figures show", ticket=ticket, step=step)
        return
    closest = _figures_of([candidates[0].group for candidates in sound])
    differing = {name: (figures.get(name), value) for name, value in closest.items() if not _near(figures, name, value)}
    found.add("figures", f"(recorded, of the groups that were seen): {differing}", step=step)


def _choose(choices: Sequence[Sequence[_Candidate]], figures: Mapping[str, float]) -> Sequence[_Candidate] | None:
    for chosen in islice(product(*choices), _MOST_CHOICES):
        if all(_near(figures, name, value) for name, value in _figures_of([one.group for one in chosen]).items()):
            return chosen
    return None


def _figures_of(groups: Sequence[Answered]) -> dict[str, float]:
    """Compute the metrics as `docs/wire.md` defines them for a step's record."""
    samples = sum(group.num_samples for group in groups)
    prompts = sum(group.num_prompt_tokens * group.num_samples for group in groups)
    values = (
        samples,
        math.fsum(reward for group in groups for reward in group.rewards) / max(1, samples),
        sum(sum(group.lengths) for group in groups) / max(1, samples),
        prompts / max(1, samples),
        math.fsum(group.generate_s for group in groups) / max(1, len(groups)),
    )
    return dict(zip(_FIGURES, values, strict=True))


def _near(figures: Mapping[str, float], name: str, value: float) -> bool:
    recorded = figures.get(name)
    return recorded is not None and math.isclose(recorded, value, rel_tol=1e-9, abs_tol=1e-9)


def _check_spans(group: Answered, record: Record, rules: Rules, step: int, found: _Findings) -> None:
    for span in group.spans:
        found.tokens_checked += span.num_tokens
        if (lag := step - 1 - span.step) > rules.max_lag:
            found.add("lag", f"tokens of a version {lag} steps old", ticket=group.number, step=step)
        announced = record.steps.get(span.version)
        if announced is None and record.newest_version < span.version:
            found.add("version", f"of version {span.version}, never announced", ticket=group.number, step=step)
        elif announced is not None and announced != span.step:
            what = f"of version {span.version}, by its group of step {span.step}, as announced of {announced}"
            found.add("version", what, ticket=group.number, step=step)
