"""What a run's folder records about each ticket, read raw: terms, manifests of checkpoints, journal, metrics.

    terms/000006                           the learner of term 6 resumed from the checkpoint that `parent` names
    checkpoints/e000006-s00000120/         manifest.json: content.state (journal, ledger, cursor, carry)
    journal/e000006-s00000120.jsonl        a header with `after`, the previous file; a line per outcome; a seal
    metrics.jsonl                          a line per step, of all terms

Committed is what the newest checkpoint in the lineage of the highest term reaches, file by file. Blocks only on the
disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TRAINED = "trained"
_NAME = re.compile(r"e(\d+)-s(\d+)")


class BrokenError(ValueError):
    """The folder contradicts itself, or lacks something that it names."""


class Ended(NamedTuple):
    """The end of a ticket."""

    ticket: int
    outcome: str
    term: int
    step: int  # the optimizer step in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """As of the newest checkpoint."""

    run_uid: str
    step: int = 0
    issued: int = 0
    resolved: tuple[tuple[int, int], ...] = ()  # from the ledger: ranges [start, end) of tickets that have ended
    retries: Mapping[int, int] = field(default_factory=dict)  # ticket number -> the dead ticket that it repeats
    cursor: str = "0-0"
    carry: frozenset[str] = frozenset()
    ended: tuple[Ended, ...] = ()  # from the journal
    figures: Mapping[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)  # by (term, step)

    def has_resolved(self, ticket: int) -> bool:
        return any(start <= ticket < end for start, end in self.resolved)


def read_history(folder: Path) -> History:
    run_uid = str(_json(folder / "run.json")["run_uid"])
    figures = dict(_figures(folder / "metrics.jsonl"))
    state = _newest_state(folder)
    if state is None:
        return History(run_uid=run_uid, figures=figures)
    stream, ledger = state["stream"], state["stream"]["ledger"]
    below = [(0, ledger["watermark"])] if ledger["watermark"] else []
    return History(
        run_uid=run_uid,
        step=state["step"],
        issued=ledger["issued"],
        resolved=tuple((start, end) for start, end in (*below, *ledger["exceptions"])),
        retries={int(number): dead for number, dead in ledger["retries"].items()},
        cursor=stream["cursor"],
        carry=frozenset(stream["carry"]),
        ended=tuple(_ended(folder, stream["journal"])),
        figures=figures,
    )


def newest_checkpoint(folder: Path) -> tuple[int, int] | None:
    """Return (term, step) in the lineage of the highest term."""
    last_steps = _line_of_descent(folder)
    found = [_place(path.name) for path in (folder / "checkpoints").glob("e*")]
    mine = [place for place in found if place and place[0] in last_steps and place[1] <= last_steps[place[0]]]
    return max(mine, default=None)


def _newest_state(folder: Path) -> dict[str, Any] | None:
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    term, step = newest
    state: dict[str, Any] = _json(folder / "checkpoints" / f"e{term:06d}-s{step:08d}" / "manifest.json")["content"]
    return state["state"]  # type: ignore[no-any-return]


def _line_of_descent(folder: Path) -> dict[int, float]:
    """Return the last step that counts, by term."""
    terms = folder / "terms"
    numbers = [int(path.name) for path in terms.iterdir() if path.name.isdecimal()] if terms.is_dir() else []
    found: dict[int, float] = {}
    term, last = max(numbers, default=0), float("inf")
    while term:
        found[term] = last
        parent = _json(terms / f"{term:06d}")["parent"]
        if parent is None:
            break
        place = _place(str(parent))
        if place is None or place[0] >= term:
            raise BrokenError(f"term {term} goes on from {parent!r}")
        term, last = place
    return found


def _ended(folder: Path, newest: str | None) -> Iterator[Ended]:
    """Yield endings, newest file first; a repeated file would loop for ever, so it is an error."""
    name, met = newest, set[str]()
    while name is not None:
        if name in met:
            raise BrokenError(f"the journal goes round at {name}")
        met.add(name)
        place = _place(name.partition(".")[0])
        lines = [json.loads(line) for line in (folder / "journal" / f"{name}.jsonl").read_text().splitlines()]
        if place is None or "num_tickets" not in lines[-1]:
            raise BrokenError(f"journal {name!r} is no journal, or is cut off")
        count = 0
        for line in lines[1:-1]:
            for start, end in line["tickets"]:
                count += end - start
                yield from (Ended(ticket, line["outcome"], place[0], line["step"]) for ticket in range(start, end))
        if count != lines[-1]["num_tickets"]:
            raise BrokenError(f"journal {name!r} says {lines[-1]['num_tickets']} tickets, and lists {count}")
        name = lines[0]["after"]


def _figures(path: Path) -> Iterator[tuple[tuple[int, int], Mapping[str, float]]]:
    """Yield the records of steps only. A crash may have truncated the last line, and lines before a restart."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "train_rollouts/rollout_size" in row:
            yield (row["term"], row["step"]), row


def _place(name: str) -> tuple[int, int] | None:
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise BrokenError(f"{path} holds no object")
    return found
