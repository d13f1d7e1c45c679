"""What a user's environment gets: one package, however it is installed, and no module under two names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wheels import built

ROOT = Path(__file__).parents[2]
PARTS = ("streamrl", "learner", "workers", "conf", "k8s", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sources and nothing that a build would leave behind; links stay links."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def expected() -> Iterator[str]:
    """Every source of the three rooms, in its place within the one package."""
    for room, place in (("streamrl", "streamrl"), ("learner", "streamrl/learner"), ("workers", "streamrl/workers")):
        for path in (ROOT / room).rglob("*.py"):
            yield f"{place}/{path.relative_to(ROOT / room)}"


def test_a_wheel_has_all_sources_in_one_package(checkout: Path, tmp_path: Path) -> None:
    names = modules(built(checkout, tmp_path, "wheel"))

    assert {name.partition("/")[0] for name in names} == {"streamrl"}
    assert {name for name in names if name.endswith(".py")} == set(expected())
    assert {"streamrl/conf/quickstart.yaml", "streamrl/ops/monitor/prometheus-rules.yaml"} <= names


def test_the_wheel_of_a_source_distribution_is_the_same(checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(built(checkout, tmp_path, "sdist")) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    assert modules(built(unpacked, tmp_path, "wheel")) == modules(built(checkout, tmp_path, "wheel"))


def test_an_editable_install_adds_one_folder_to_the_path(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built(checkout, tmp_path, "editable")) as file:
        (link,) = [name for name in file.namelist() if name.endswith(".pth")]

        assert file.read(link).decode().split() == [str(checkout)]


@pytest.mark.parametrize("room", ["workers", "learner"])
def test_a_program_of_a_checkout_loads_no_module_under_two_names(room: str) -> None:
    program = f"""
import runpy, sys
sys.argv = ["{room}", "--help"]
try:
    runpy.run_module("{room}", run_name="__main__")
except SystemExit:
    pass
files = [module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]
import os
rooms = tuple(os.path.join({str(ROOT)!r}, room, "") for room in ("streamrl", "learner", "workers"))
real = [os.path.realpath(file) for file in files if file.startswith(rooms) and not file.endswith("__init__.py")]
assert len(real) == len(set(real)), sorted(real)
assert any(file.endswith("/{room}/main.py") for file in real), real
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=240, check=True, stdout=subprocess.DEVNULL)
