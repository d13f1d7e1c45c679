"""Saves the results of a long measurement as they finish, so that an interrupted one resumes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMPLETE = "complete"


class Done:
    """A file of JSON lines: what was measured, then results by name. A file about something else, or a complete one, is
    started over."""

    def __init__(self, path: Path, *, of: str, fresh: bool = False) -> None:
        self._path = path
        self._results: dict[str, Mapping[str, Any]] = {}
        lines = [] if fresh or not path.exists() else _whole_lines(path)
        if lines and lines[0] == {"of": of} and {_COMPLETE: True} not in lines:
            self._results = {line["name"]: line["result"] for line in lines[1:]}
        else:
            lines = [{"of": of}]
        # Rewrite the file even when resuming: a truncated last line would corrupt the next.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._results[name]

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        self._results[name] = result
        self._append({"name": name, "result": result})

    def complete(self) -> None:
        """Mark the measurement as complete."""
        self._append({_COMPLETE: True})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def commit_of(folder: Path) -> str:
    """Return the commit of the sources; uncommitted changes are ignored."""
    words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "no commit"


def _whole_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return all lines but a truncated last one."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
