"""What tests share of an installed streamrl, that is an environment with a wheel of it and no checkout; and of vLLM's
processes in one of the tests' own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wheels import built

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "learner,worker-cpu,rewards,monitor,embedded"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with `streamrl` in it. Nothing is kept out of the environment: vLLM brings what it asks for."""
    folder = tmp_path_factory.mktemp("installed")
    wheel, environment = built(ROOT, folder, "wheel"), folder / "environment"
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, environment],
        timeout=240,
        check=True,
    )
    try:
        words = (sys.executable, "--quiet", "--python", python, f"{wheel}[{EXTRAS}]")
        subprocess.run([ROOT / ".ci" / "uv-install", *words], cwd=folder, timeout=1200, check=True)
        yield python.parent
    finally:
        shutil.rmtree(environment)  # of some gigabytes, where pytest keeps folders for a while


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def alone(programs: Path, empty: Path) -> dict[str, str]:
    """The variables of somebody who has that environment, and nothing of this one."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return mine | {"PATH": path, "VLLM_CACHE_ROOT": str(empty / "vllm")}  # it knows no model's class yet


@pytest.fixture
def environment() -> Iterator[None]:
    """As it was, afterwards: vLLM is told, and tells its processes, through it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
