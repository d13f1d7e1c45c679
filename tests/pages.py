"""The pages that people read, and the blocks in them. A block of commands bears a tag, in a comment that nobody sees:

    <!-- run -->                     the fast tests run it (tests/unit/test_pages.py)
    <!-- long -->                    the long ones do (tests/integration/test_pages_long.py)
    <!-- run: tests/.../test_x.py -->, or `long: ` so      that test does, with the arguments that it needs
    <!-- never: why -->              nobody does
    <!-- all long: tests/.../test_x.py -->   so for all blocks of the page that have no tag of their own

It runs in a folder that holds what its reader has by then: `lay_out`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.run_folders import make_folder

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "k8s/README.md")), *sorted(ROOT.glob("docs/*.md"))]
COMMANDS = ("sh", "bash", "console")  # what a shell runs; in a console after `$ `, with what it shows
LANGUAGES = (*COMMANDS, "python", "yaml", "json", "text")
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<tag>\w+)(?:: (?P<note>[^\n]*?))? -->\n+(?P=indent))?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    tag: str | None
    note: str  # the test that runs it, or why none does
    text: str

    def __str__(self) -> str:
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    of_all = re.search(r"^<!-- all (\w+): (.*?) -->$", text, re.MULTILINE)
    tag, note = of_all.groups() if of_all else (None, "")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            tag=found["tag"] or tag,
            note=found["note"] or (note if not found["tag"] else ""),
            text=re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
        )
        for found in _BLOCK.finditer(text)
        if not languages or found["language"] in languages
    ]


def tagged(tag: str) -> list[Block]:
    """What is run by the tests of pages themselves; a block of Python may bear a tag, too."""
    return [each for page in PAGES for each in blocks(page) if each.tag == tag and not each.note]


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def lay_out(folder: Path, page: Path) -> None:
    """What the page has its reader write, and what pages take for granted: prompts, and a run that has ended."""
    rows = [each.text for each in blocks(page, "json")] or [json.dumps({"text": "2+2=", "answer": "4"}) + "\n"]
    (folder / "prompts.jsonl").write_text(rows[0])
    (folder / "held-out.jsonl").write_text(rows[0])
    tasks = [{"text": "Write a line.", "task": "poem"}, {"text": "2+2=", "task": "sum"}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    problem: dict[str, object] = {"text": "Write add(a, b).", "solution": "def add(a, b): return a + b"}
    problem["tests"] = ["assert add(2, 3) == 5", "assert add(1, 1) == 3, 'three'"]
    (folder / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    for block in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", block.text):
            (folder / named[1]).write_text(block.text)
    make_folder(folder / "runs", "mine", "finished")


def programs(folder: Path) -> Mapping[str, str]:
    """Variables under which a shell finds the programs of this environment, without a network."""
    folder.mkdir()
    for name, words in {"streamrl": "-m streamrl.ops.cli.main", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",  # what pages show is not broken into lines
    }


def run(
    command: str, folder: Path, variables: Mapping[str, str], *, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """All that it prints is its stdout."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def follow(block: Block, folder: Path, variables: Mapping[str, str], *, timeout_s: float = 240) -> None:
    """AssertionError where a command fails, or shows something else than the page says."""
    if block.language != "console":
        command = f"python - <<'END'\n{block.text}END\n" if block.language == "python" else block.text
        done = run(command, folder, variables, timeout_s=timeout_s)
        assert done.returncode == 0, f"{block}: ended with {done.returncode}\n{done.stdout}"
        return
    for command, shown in told(block.text):
        done = run(command, folder, variables, timeout_s=timeout_s)
        assert _timeless(done.stdout) == _timeless(shown), f"{block}: {command}"
        assert done.returncode == 0 or "error" in shown, f"{block}: {command} ended with {done.returncode}"


def told(console: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, and what it shows."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def _timeless(text: str) -> str:
    return re.sub(r"^took .*$", "took", text, flags=re.MULTILINE).rstrip()
