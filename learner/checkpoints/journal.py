"""The journal: how each ticket ended, and during which optimizer step. One file per commit, never removed.

    run folder/
      journal/
        e000001-s00000010.jsonl      what ended between the checkpoint before and this one
        e000001-s00000010.1.jsonl    what ended since then without another step: the checkpoint was committed again
        e000002-s00000020.jsonl

    {"schema": 2, "run_uid": "5f...", "after": "e000001-s00000010.1"}          the file before, null for the first
    {"step": 11, "outcome": "trained", "tickets": [[40, 43]], "asked": ["1c...", "07...", "b2..."]}
    {"step": 12, "outcome": "dropped/stale", "tickets": [[43, 44], [46, 47]], "asked": ["9f...", "e0..."]}
    {"num_tickets": 5, "digest": "8c..."}                                      XXH3-128 of all lines before

Tickets are ranges [start, end); `asked` holds each one's identity (wire.ticket) at the time of issue. If the group that
ended a ticket has another identity, which should never be accepted, the line records it for the audit: `"answered":
{"41": "55..."}`.

A file is written and synced just before the checkpoint whose manifest names it. So the rename of the checkpoint remains
the only commit point of a run: a file that no checkpoint names, because the learner died in between or was replaced,
does not count, and the tickets it lists will end again. A run's journal is the chain of files from the newest complete
checkpoint of the surviving lineage back to the first. Finding a ticket's outcome in it needs neither pruned checkpoints
nor the ledger's counters, which it serves to check.

Endings stay in memory until the commit: that is bounded by what ends between two commits, and the cost per ticket does
not grow with the run. Blocks on the disk only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from operator import attrgetter
from pathlib import Path

import xxhash

from streamrl.files import create_exclusively, fsync_folder
from streamrl.learner.groups.ledger import Ending

_SCHEMA = 2


def write_journal(root: Path, checkpoint: str, endings: Sequence[Ending], *, after: str | None, run_uid: str) -> str:
    """Write the endings that a checkpoint is about to commit; return the name for its manifest."""
    folder = root / "journal"
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        fsync_folder(root)
    lines = "".join(json.dumps(line) + "\n" for line in _lines(endings, after=after, run_uid=run_uid))
    seal = {"num_tickets": len(endings), "digest": xxhash.xxh3_128_hexdigest(lines.encode())}
    data = f"{lines}{json.dumps(seal)}\n".encode()
    # An existing file may be committed, whatever the caller believes: never overwrite one.
    names = chain([checkpoint], (f"{checkpoint}.{again}" for again in count(1)))
    return next(name for name in names if create_exclusively(folder / f"{name}.jsonl", data))


def _lines(endings: Iterable[Ending], *, after: str | None, run_uid: str) -> Iterator[dict[str, object]]:
    yield {"schema": _SCHEMA, "run_uid": run_uid, "after": after}
    by_ending: dict[tuple[int, str], list[Ending]] = {}
    for ending in endings:
        by_ending.setdefault((ending.step, ending.outcome), []).append(ending)
    for (step, outcome), ended in by_ending.items():
        ended.sort(key=attrgetter("ticket"))
        others = {str(one.ticket): one.answered for one in ended if one.answered not in ("", one.asked)}
        yield {
            "step": step,
            "outcome": outcome,
            "tickets": _ranges([one.ticket for one in ended]),
            "asked": [one.asked for one in ended],
            **({"answered": others} if others else {}),
        }


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as ranges [start, end); a duplicate begins another range, for the audit to see."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges
