"""A run's folder written by hand in the documented layout, without the code that writes it: evidence for audits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from streamrl.ops.audit.commit import LastCommit
from streamrl.ops.audit.streams import Streams

UID = "uid"
Ranges = Sequence[tuple[int, int]]  # [start, end)


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").write_text(json.dumps({"run_uid": UID}))

    def term(self, number: int, *, parent: str | None = None) -> None:
        (self.path / "terms").mkdir(exist_ok=True)
        (self.path / "terms" / f"{number:06d}").write_text(json.dumps({"parent": parent, "run_uid": UID}))

    def journal(
        self,
        name: str,
        *lines: tuple[int, str, Ranges],
        after: str | None = None,
        answered: Mapping[int, Mapping[str, str]] | None = None,
    ) -> Path:
        """Lines are (step, outcome, ticket ranges); `answered`, by step: tickets ended by an answer to another."""
        (self.path / "journal").mkdir(exist_ok=True)
        others = {step: {"answered": dict(those)} for step, those in (answered or {}).items()}
        records = [
            {"step": step, "outcome": outcome, "tickets": list(ranges), **others.get(step, {})}
            for step, outcome, ranges in lines
        ]
        body = "".join(json.dumps(r) + "\n" for r in [{"schema": 2, "run_uid": UID, "after": after}, *records])
        num_tickets = sum(end - start for _, _, ranges in lines for start, end in ranges)
        seal = {"num_tickets": num_tickets, "digest": xxhash.xxh3_128_hexdigest(body.encode())}
        path = self.path / "journal" / f"{name}.jsonl"
        path.write_text(body + json.dumps(seal) + "\n")
        return path

    def checkpoint(
        self,
        name: str,
        *,
        issued: int,
        ended: int,
        exceptions: Ranges = (),
        outcomes: Mapping[str, int] | None = None,
        cursor: str = "0-0",
        carry: Sequence[str] = (),
        journal: str | None = "",
    ) -> Path:
        """`ended` is the low watermark; all below it are trained unless `outcomes` says otherwise."""
        folder = self.path / "checkpoints" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(b"w" * 10)
        ledger = {
            "issued": issued,
            "watermark": ended,
            "exceptions": list(exceptions),
            "outcomes": {"trained": ended} if outcomes is None else outcomes,
            "asked": {},
        }
        stream = {
            "cursor": cursor,
            "carry": list(carry),
            "ledger": ledger,
            "journal": name if journal == "" else journal,
        }
        state = {"step": int(name[-8:]), "stream": stream}
        content = {"schema": 4, "files": {"weights": [10, "digest"]}, "state": state}
        digest = xxhash.xxh3_128_hexdigest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
        (folder / "manifest.json").write_text(json.dumps({"content": content, "digest": digest}))
        return folder


def clean_folder(path: Path) -> RunFolder:
    """Two learners: of 12 tickets issued, 8 are trained, 1 dropped, 1 dead and 2 open."""
    folder = RunFolder(path)
    folder.term(1)
    folder.journal("e000001-s00000010", (5, "trained", [(0, 3), (4, 5)]), (9, "dropped/stale", [(3, 4)]))
    folder.checkpoint("e000001-s00000010", issued=7, ended=5, outcomes={"trained": 4, "dropped/stale": 1})
    folder.term(2, parent="e000001-s00000010")
    folder.journal(
        "e000002-s00000020",
        (11, "trained", [(5, 8)]),
        (12, "trained", [(10, 11)]),
        (20, "dead", [(8, 9)]),
        after="e000001-s00000010",
    )
    folder.checkpoint(
        "e000002-s00000020",
        issued=12,
        ended=9,
        exceptions=[(10, 11)],
        outcomes={"trained": 8, "dropped/stale": 1, "dead": 1},
        cursor="50-0",
        carry=["40-1"],
    )
    return folder


def make_streams(**changes: Any) -> Streams:
    fields: dict[str, Any] = {
        "server": "here",
        "learner_is_live": False,
        "issued": None,
        "issued_since": 0,
        "window": 10,
        "tickets": (),
        "groups": (),
        "malformed": {},
        "dead_letters": 0,
        "eval_tickets": 0,
        "eval_groups": 0,
    }
    return Streams(**{**fields, **changes})


def make_commit(**changes: Any) -> LastCommit:
    fields: dict[str, Any] = {
        "run_uid": UID,
        "term": 1,
        "lineage": {1: None},
        "checkpoint": "e000001-s00000010",
        "issued": 6,
        "resolved": ((0, 4),),
        "outcomes": {"trained": 4},
        "cursor": (50, 0),
        "carry": frozenset({(40, 1)}),
    }
    return LastCommit(**{**fields, **changes})
