"""The code base in figures: the distance from a ticket to its gradient, and the sizes of folders, files and functions.

trace    a run of one step on this machine, whose processes record which modules a ticket visits (`bench.steps`)
sources  cyclic imports between folders, files at the learner's root, sizes, the share of docstrings
types    strict mypy over all packages
"""

from __future__ import annotations

import ast
import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.demos.quickstart import write_base_model, write_data
from streamrl.errors import ResourceError

ROOT = Path(__file__).parents[1]
ROOMS = ("streamrl", "workers", "learner")
_DOCSTRINGS = 9.99  # % of all lines
_TRACE_LIMIT_S = 400
_MYPY = (sys.executable, "-m", "mypy")
_CONFIG = """
name: house
dir: {dir}
model: {{path: {dir}/base, dtype: float32}}
data: {{train: {dir}/data/train.jsonl, max_prompt_tokens: 16}}
sampling: {{num_samples: 4, max_tokens: 8}}
rewards: {{exact: {{type: function, target: exact_match}}}}
algorithm: {{drop_zero_variance: false, mask_unfinished: false}}
training: {{groups_per_step: 4, max_steps: 1}}
weights: {{dtype: float32}}
worker: {{threads: 1}}
learner: {{threads: 1}}
validation: {{at_start: false, at_end: false, every_steps: 0}}
"""


@dataclass(frozen=True, slots=False, kw_only=True)
class Source:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        return str(self.path.parent.relative_to(ROOT))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[int]:
        """Yield the number of lines of each function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1

    @cached_property
    def docstring_lines(self) -> set[int]:
        found: set[int] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if ast.get_docstring(node, clean=False) is not None:
                found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return found

    def num_code_lines(self) -> int:
        """Count lines, without blank lines, comments and docstrings."""
        silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in silent:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - self.docstring_lines)

    def imported(self) -> Iterator[str]:
        """Yield our modules that this one imports, including imports inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.startswith("streamrl"))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamrl"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def bench(*, quick: bool, say: Say) -> list[Line]:
    sources = [Source(path=path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    lines: list[Line] = list(_sizes(sources))
    cycles = folder_cycles(sources)
    for cycle in cycles:
        say(f"folders that import one another: {' , '.join(cycle)}")
    at_root = sum(source.folder == "learner" and source.num_lines > 0 for source in sources)
    lines += [
        Bar(name="folder cycles", value=float(len(cycles)), unit="", goal=0, better="lower"),
        Bar(name="files at learner/", value=float(at_root), unit="", goal=10, better="lower"),
    ]
    say("types")
    lines.append(Bar(name="errors of strict mypy", value=float(type_errors()), unit="", goal=0, better="lower"))
    if not quick:
        say("a run of one step, traced; a minute")
        visited = _visited()
        for module in visited:
            say(f"  {module}")
        lines.append(
            Bar(name="modules between a ticket and its gradient", value=len(visited), unit="", goal=30, better="lower")
        )
    return lines


def _sizes(sources: list[Source]) -> Iterator[Line]:
    functions = [size for source in sources for size in source.functions()]
    files = [source.num_lines for source in sources]
    code = sum(source.num_code_lines() for source in sources)
    share = 100 * sum(len(source.docstring_lines) for source in sources) / sum(files)
    yield Bar(name="functions, median", value=statistics.median(functions), unit="lines", goal=8, better="lower")
    yield Bar(name="functions, longest", value=float(max(functions)), unit="lines", goal=60, better="lower")
    yield Bar(name="files, longest", value=float(max(files)), unit="lines", goal=350, better="lower")
    yield Bar(name="docstrings, of all lines", value=share, unit="%", goal=_DOCSTRINGS, better="higher")
    yield Fact(name="code", value=float(code), unit="lines")
    yield Fact(name="files", value=float(len(files)), unit="")


def folder_cycles(sources: list[Source]) -> list[list[str]]:
    """Return folders that import themselves through other folders. Entry points are left out: `__main__` and the
    package that users import."""
    folders = {source.folder for source in sources}
    known: dict[str, set[str]] = {folder: set() for folder in folders}
    for source in sources:
        if source.path.name == "__main__.py" or source.path == ROOT / "streamrl" / "__init__.py":
            continue
        for module in source.imported():
            folder = _folder_of(module, folders)
            if folder != source.folder:
                known[source.folder].add(folder)
    reached = {folder: _reach(folder, known) for folder in folders}
    cycles = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in folders if a in reached[a]}
    return [list(cycle) for cycle in sorted(cycles)]


def _folder_of(module: str, folders: set[str]) -> str:
    path = Path(*_at_top(module.split(".")))
    while str(path) not in folders:
        path = path.parent
    return str(path)


def _at_top(parts: list[str]) -> list[str]:
    """Strip the prefix of a linked package: `streamrl.learner` is a link to `learner`."""
    return parts[1:] if parts[1:2] in (["learner"], ["workers"]) else parts


def _reach(folder: str, known: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(known[folder])
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += known[one]
    return found


def type_errors(mypy: Sequence[str] = _MYPY) -> int:
    done = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"Found (\d+) errors?", done.stdout)
    if found is None and done.returncode != 0:
        raise ResourceError(f"mypy did not run: {(done.stdout + done.stderr).strip()[-2000:]}")
    return int(found[1]) if found else 0


def _visited() -> list[str]:
    with tempfile.TemporaryDirectory(prefix="house-") as temporary:
        folder = Path(temporary)
        steps = folder / "steps"
        steps.mkdir()
        write_base_model(folder / "base", seed=1)
        write_data(folder / "data", seed=1)
        (folder / "house.yaml").write_text(_CONFIG.format(dir=folder))
        environment = {
            **os.environ,
            "STREAMRL_STEPS_TO": str(steps),
            "STREAMRL_STEPS_OF": str(ROOT),
            "PYTHONPATH": f"{Path(__file__).with_name('steps')}:{ROOT}",
        }
        command = [sys.executable, "-m", "streamrl.ops.cli.main", "up", str(folder / "house.yaml")]
        subprocess.run(
            command, cwd=ROOT, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            timeout=_TRACE_LIMIT_S,
        )  # fmt: skip
        seen = {line.partition(":")[0] for path in steps.iterdir() for line in path.read_text().splitlines()}
    return sorted({str(Path(name).resolve().relative_to(ROOT)) for name in seen})
