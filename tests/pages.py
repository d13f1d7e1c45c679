"""The documentation pages and their code blocks. A block of commands has a tag, in an HTML comment:

    <!-- run -->                     run by the fast tests (tests/unit/test_pages.py)
    <!-- long -->                    run by the long ones (tests/integration/test_pages_long.py)
    <!-- run: tests/.../test_x.py -->, or `long: ` likewise      run by that test, with the arguments that it needs
    <!-- never: why -->              run by none
    <!-- all long: tests/.../test_x.py -->   the tag of all blocks of the page that have none of their own

A block runs in a folder with what its reader has at that point: `lay_out`.
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
COMMANDS = ("sh", "bash", "console")  # run by a shell; in a console block after `$ `, followed by its output
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
    """The blocks run by the tests of pages themselves; Python blocks may have a tag, too."""
    return [each for page in PAGES for each in blocks(page) if each.tag == tag and not each.note]


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def lay_out(folder: Path, page: Path) -> None:
    """Write what the page tells its reader to write, and what pages assume: prompts, and a run that has ended."""
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
    """Return variables with which a shell finds this environment's programs, without network access."""
    folder.mkdir()
    for name, words in {"streamrl": "-m streamrl.ops.cli.main", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",  # so that output is not wrapped
    }


def run(
    command: str, folder: Path, variables: Mapping[str, str], *, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a command; its stderr is part of its stdout."""
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
    """Run a block. AssertionError if a command fails, or its output differs from the page's."""
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
    """Yield each command of a console block, with its output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def _timeless(text: str) -> str:
    return re.sub(r"^took .*$", "took", text, flags=re.MULTILINE).rstrip()
