"""Packages that were built for another torch: they are found by their files, and are as if not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import importlib.util, json, sys
from streamrl.misfits import misfits
assert "torch" not in sys.modules
found = importlib.util.find_spec("torchvision")
try:
    import torchvision
    said = "imported"
except ImportError:
    said = "not there"
print(json.dumps([list(misfits().values()), found is not None, said]))
"""


def write_package(folder: Path, name: str, version: str, *, needs: str | None = None) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\n")
    if needs is not None:
        (folder / f"{name}-1.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nRequires-Dist: numpy\nRequires-Dist: {needs}\n"
        (folder / f"{name}-1.dist-info" / "METADATA").write_text(metadata)


def seen(folder: Path) -> list[object]:
    """What does not fit, whether torchvision is found, and how its import ends."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    told: list[object] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    ("torch", "torchvision", "needs"),
    [
        ("2.13.0+cpu", "0.28.0+cu130", "torch (==2.13.0)"),  # pip takes it where there is no other
        ("2.13.0+cu130", "0.28.0+cpu", "torch==2.13.0"),
        ("2.13.0+cu130", "0.28.0+cu126", "torch==2.13.0"),
        ("2.13.0", "0.27.0", "torch==2.12.0"),
    ],
)
def test_what_does_not_fit_torch_is_as_if_not_installed(
    tmp_path: Path, torch: str, torchvision: str, needs: str
) -> None:
    write_package(tmp_path, "torch", torch)
    write_package(tmp_path, "torchvision", torchvision, needs=needs)

    assert seen(tmp_path) == [[f"torchvision {torchvision} does not fit torch {torch}"], False, "not there"]


@pytest.mark.parametrize(
    ("torch", "torchvision", "needs"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", "torch==2.13.0"),
        ("2.13.0+cu130", "0.28.0+cu131", "torch==2.13.0"),  # minor versions of CUDA fit each other
        ("2.13.0", "0.28.0", "torch==2.13.0"),
        ("2.14.1+cu130", "0.29.1+cu130", "torch>=2.14.0"),
        ("2.9.0a0+50eac811a6.nv25.09", "0.24.0a0+98f8b37", "torch==2.9.0a0+50eac811a6.nv25.09"),  # built by a vendor
        ("2.13.0+cpu", "0.28.0", None),
    ],
)
def test_what_fits_is_left_alone(tmp_path: Path, torch: str, torchvision: str, needs: str | None) -> None:
    write_package(tmp_path, "torch", torch)
    write_package(tmp_path, "torchvision", torchvision, needs=needs)

    assert seen(tmp_path) == [[], True, "imported"]


def test_torchaudio_is_looked_at_too(tmp_path: Path) -> None:
    write_package(tmp_path, "torch", "2.13.0+cpu")
    write_package(tmp_path, "torchaudio", "2.11.0+cu130")

    assert seen(tmp_path)[0] == ["torchaudio 2.11.0+cu130 does not fit torch 2.13.0+cpu"]
