"""`docs/recipes.md` as a reader follows it: its code blocks, and the edits of a checkout that they show."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
_PARTS = ("streamrl", "learner", "workers", "conf")  # what `make setup` installs in place
_EDIT = re.compile(r"^# (?P<file>[\w/]+\.py)(?:, (?P<where>in|above) (?P<name>\w+))?\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    file: str
    where: str | None  # `in` or `above` the assignment of `name`; None: a new file
    name: str | None
    text: str


def recipes() -> list[str]:
    return re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)


def blocks(recipe: str, language: str) -> list[str]:
    """Return the blocks of one recipe, such as `Add a loss`, in order."""
    section = re.search(rf"^## {recipe}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section, f"no recipe {recipe!r}"
    return re.findall(rf"^```{language}\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)


def edits(recipe: str) -> list[Edit]:
    """Return a recipe's edits, of the project's files and of the reader's own."""
    found = []
    for block in blocks(recipe, "python"):
        marks = list(_EDIT.finditer(block))
        ends = [*(mark.start() for mark in marks), len(block)][1:]
        found += [Edit(**mark.groupdict(), text=block[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    return found


def steps(recipe: str) -> list[str]:
    """Return the code that the reader tries without writing it to a file."""
    return [block for block in blocks(recipe, "python") if not _EDIT.match(block)]


def write(edit: Edit, root: Path) -> None:
    path = root / edit.file
    if edit.name is None:
        assert not path.exists(), f"{edit.file} is no new file"
        path.write_text(edit.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    first, last = _assignment(edit.name, path)
    at, text = (first - 1, edit.text + "\n\n") if edit.where == "above" else (last - 1, edit.text)
    path.write_text("".join([*lines[:at], text, *lines[at:]]))


def _assignment(name: str, path: Path) -> tuple[int, int]:
    """Return its first line, and its last with the closing bracket."""
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert node.end_lineno, f"{name} has an end"
            return node.lineno, node.end_lineno
    raise AssertionError(f"{path} has no {name}")


def checkout(folder: Path) -> Path:
    """Copy the parts that recipes edit."""
    for part in _PARTS:
        shutil.copytree(ROOT / part, folder / part, symlinks=True)
    return folder


def followed(recipe: str, folder: Path) -> Path:
    """Return a copy with only that recipe's edits of the project."""
    root = checkout(folder)
    made = [edit for edit in edits(recipe) if "/" in edit.file]
    assert made, f"{recipe!r} edits nothing"
    for edit in made:
        write(edit, root)
    return root


def run(root: Path, *arguments: str, expect: int = 0) -> str:
    """Run Python with the copy as the project; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{ROOT}"},  # the latter for `tests` only
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr
