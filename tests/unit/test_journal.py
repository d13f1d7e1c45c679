from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from streamrl.learner.checkpoints.journal import write_journal
from streamrl.learner.groups.ledger import Ending


def read(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "journal" / f"{name}.jsonl").read_text().splitlines()]


def test_a_file_tells_which_ticket_ended_how_and_in_which_step(tmp_path: Path) -> None:
    endings = [Ending(11, "trained", n, asked=f"ask {n}", answered=f"ask {n}") for n in (4, 2, 3, 9)]
    endings += [Ending(12, "dropped/stale", 5, asked="ask 5", answered="ask 6"), Ending(12, "dead", 0, asked="ask 0")]
    name = write_journal(tmp_path, "e000001-s00000020", endings, after="e000001-s00000010", run_uid="uid")
    assert name == "e000001-s00000020"
    assert read(tmp_path, name)[:-1] == [
        {"schema": 2, "run_uid": "uid", "after": "e000001-s00000010"},
        {
            "step": 11,
            "outcome": "trained",
            "tickets": [[2, 5], [9, 10]],
            "asked": ["ask 2", "ask 3", "ask 4", "ask 9"],
        },
        {
            "step": 12,
            "outcome": "dropped/stale",
            "tickets": [[5, 6]],
            "asked": ["ask 5"],
            "answered": {"5": "ask 6"},
        },
        {"step": 12, "outcome": "dead", "tickets": [[0, 1]], "asked": ["ask 0"]},
    ]


def test_the_last_line_seals_those_before(tmp_path: Path) -> None:
    name = write_journal(tmp_path, "e000001-s00000010", [Ending(1, "trained", 0)], after=None, run_uid="uid")
    text = (tmp_path / "journal" / f"{name}.jsonl").read_bytes()
    body = b"".join(text.splitlines(keepends=True)[:-1])
    assert read(tmp_path, name)[-1] == {"num_tickets": 1, "digest": xxhash.xxh3_128_hexdigest(body)}


def test_a_commit_in_which_nothing_ended_has_a_file_too(tmp_path: Path) -> None:
    name = write_journal(tmp_path, "e000001-s00000010", [], after=None, run_uid="uid")
    assert [set(line) for line in read(tmp_path, name)] == [{"schema", "run_uid", "after"}, {"num_tickets", "digest"}]


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    names = [
        write_journal(tmp_path, "e000001-s00000010", [Ending(1, "dead", n)], after=None, run_uid="uid")
        for n in range(3)
    ]
    assert names == ["e000001-s00000010", "e000001-s00000010.1", "e000001-s00000010.2"]
    assert [read(tmp_path, name)[1]["tickets"] for name in names] == [[[0, 1]], [[1, 2]], [[2, 3]]]


def test_a_ticket_that_ends_twice_is_written_twice(tmp_path: Path) -> None:
    name = write_journal(tmp_path, "e000001-s00000010", [Ending(1, "trained", 7)] * 2, after=None, run_uid="uid")
    assert read(tmp_path, name)[1]["tickets"] == [[7, 8], [7, 8]]


def test_a_ticket_costs_few_bytes_however_many_there_are(tmp_path: Path) -> None:
    """In order, as tickets mostly end."""
    endings = [Ending(1 + n // 16, "trained", n, f"{n:016x}", f"{n:016x}") for n in range(16 * 1000)]
    name = write_journal(tmp_path, "e000001-s00001000", endings, after=None, run_uid="uid")
    assert (tmp_path / "journal" / f"{name}.jsonl").stat().st_size < 26 * len(endings)
