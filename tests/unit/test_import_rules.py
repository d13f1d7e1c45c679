"""The rooms keep apart: who may import what, read from the sources, imports inside of functions included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.house import ROOMS, Source, folder_cycles

ROOT = Path(__file__).parents[2]

SIDES = ("streamrl.learner", "streamrl.workers")
# Besides the table of docs/architecture.md, which says what the folders may import of each other.
FORBIDDEN = {
    # The shared library serves machines that have neither torch nor a GPU: monitors, CI, the operator's laptop.
    "streamrl": ("torch", "vllm", "transformers"),
    # A worker never waits for a rank: it knows the learner by the stream alone.
    "workers": ("torch.distributed",),
    "learner": ("vllm",),
}
# Formulas of tensors, which whoever checks a configuration imports too: they may name torch's types, and no more.
TYPES_ALONE = ROOT / "streamrl" / "recipe"
# Commands are the one place where the library may call on the applications.
CALLERS = ROOT / "streamrl" / "ops" / "cli"


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Every absolute import with its line; `from a import b` may import the module a.b, so both are given."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield node.lineno, ast.literal_eval(node.args[0])


class _Running(ast.NodeTransformer):
    """What is left when the program runs."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def running(source: str) -> str:
    return ast.unparse(_Running().visit(ast.parse(source)))


def _is_import_call(call: ast.Call) -> bool:
    """`import_module("name")` or `__import__("name")`, by whatever path."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    names_it = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return function in ("import_module", "__import__") and names_it


def offences(source: str, forbidden: tuple[str, ...]) -> list[tuple[int, str]]:
    found = [(line, name) for line, name in imported_modules(source) if _is_within(name, forbidden)]
    return list(dict.fromkeys(found))


def _is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_room_imports_what_it_must_not(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ holds no sources"

    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in offences(read(file), FORBIDDEN[room])
    ]
    assert found == []


@cache
def table_of_imports() -> dict[str, set[str]]:
    """By folder, what it may import according to docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \|.*\|(.*)\|$", text.partition("| may import |")[2].partition("\n\n")[0], re.M)
    return {folder: set(re.findall(r"`([\w/]+)`", allowed)) for folder, allowed in rows}


def folder_of(file: Path) -> str:
    """The row of the table that a source belongs to."""
    name = file.relative_to(ROOT).as_posix()
    return max((folder for folder in table_of_imports() if name.startswith(f"{folder}/")), key=len)


def test_the_folders_import_each_other_as_the_architecture_page_says() -> None:
    table = table_of_imports()
    names = {folder.removeprefix("streamrl/") for folder in table}
    assert {"learner", "workers", "protocol", "ops", "ops/cli"} < names
    found = []
    for file in (path for room in table for path in sorted((ROOT / room).rglob("*.py"))):
        own = folder_of(file)
        allowed = {*table[own], own.removeprefix("streamrl/")}
        for line, name in imported_modules(running(file.read_text())):
            path = name.removeprefix("streamrl.").replace(".", "/")
            is_ruled = name.startswith("streamrl.") and path.split("/")[0] in names
            if is_ruled and not any(path == one or path.startswith(f"{one}/") for one in allowed):
                found.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert sorted(set(found)) == []


def read(file: Path) -> str:
    return running(file.read_text()) if file.is_relative_to(TYPES_ALONE) else file.read_text()


def test_an_import_for_types_alone_is_none_when_the_program_runs() -> None:
    types = "if TYPE_CHECKING:\n    import torch\n"
    assert offences(types, ("torch",))
    assert not offences(running(types), ("torch",))
    for runs in (types + "else:\n    import torch", "if torch_is_there:\n    import torch", "import torch"):
        assert offences(running(runs), ("torch",))


def test_everything_is_imported_by_one_name() -> None:
    """`workers.main` and `streamrl.workers.main` would be two modules, each with state of its own."""
    files = [file for room in (*ROOMS, "tests", "bench") for file in sorted((ROOT / room).rglob("*.py"))]

    assert [file for file in files if offences(file.read_text(), ("workers", "learner"))] == []


def test_no_two_folders_import_each_other() -> None:
    sources = [Source(path=path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

    assert folder_cycles(sources) == []


def test_the_shared_library_knows_the_applications_only_from_its_commands() -> None:
    files = [file for file in sorted((ROOT / "streamrl").rglob("*.py")) if not file.is_relative_to(CALLERS)]

    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in offences(file.read_text(), SIDES)
    ]
    assert found == []


@pytest.mark.parametrize("part", ["engines", "rewards"])
def test_what_a_worker_is_made_of_knows_neither_the_worker_nor_each_other(part: str) -> None:
    own = f"streamrl.workers.{part}"
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / "workers" / part).rglob("*.py"))
        for line, name in offences(file.read_text(), ("streamrl.workers",))
        if not _is_within(name, (own,))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "def f():\n    import torch",
        "from torch.nn import functional",
        "import_module('torch.nn')",
        "importlib.import_module('torch')",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert offences(source, ("torch",))


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("from torch import distributed", "torch.distributed"),
        ("from torch.distributed import init", "torch.distributed"),
    ],
)
def test_a_module_of_a_package_is_seen_however_it_is_named(source: str, package: str) -> None:
    assert offences(source, (package,))


@pytest.mark.parametrize(
    "source", ["import torchvision", "from . import torch", "from streamrl import torchless", "x = 'torch'"]
)
def test_what_only_looks_like_it_is_left_alone(source: str) -> None:
    assert not offences(source, ("torch",))
