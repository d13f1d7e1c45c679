"""An interpreter with this one's packages and a few more: for libraries that a run may use and no test needs.

It is created once in build/packages, with vLLM's pins unless a library conflicts with them: what resolves there can be
installed beside a worker. If packages cannot be downloaded, the tests are skipped and say why.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import xxhash

ROOT = Path(__file__).parents[1]
_SHORT = """
name: short
dir: .
model: {path: base, dtype: float32}
algorithm: {drop_zero_variance: false}  # a model of chance earns like rewards
training: {max_steps: 2}
optimizer: {lr: 1e-4, min_lr: 1e-5}
weights: {dtype: float32}
validation: {every_steps: 0}
worker: {threads: 1, engine: transformers, grace_s: 2.0}
learner: {threads: 1}
"""


def python_with(*requirements: str, beside_ours: bool = True) -> Path:
    """Return such an interpreter. `beside_ours=False`, for a program that is only called, hides our packages."""
    told = repr((requirements, beside_ours, sys.executable, sys.version)).encode()
    folder = ROOT / "build" / "packages" / f"{requirements[0].partition('=')[0]}-{xxhash.xxh3_64_hexdigest(told)}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes may need the same
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _call("-m", "uv", "venv", "--quiet", "--python", sys.executable, str(folder))
            pins = _pins(folder) if beside_ours else ()
            installed = _install(python, *pins, *requirements)
            if installed.returncode:
                words = installed.stderr.strip().splitlines()
                pytest.skip(f"{' '.join(requirements)} cannot be installed: {words[-1] if words else 'no word why'}")
            (folder / "made").touch()
    return python


def environment(**more: str) -> dict[str, str]:
    """Environment for one of our programs in it."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def call(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of our programs in this folder, with its own cache."""
    ours = environment(XDG_CACHE_HOME=str(folder / "cache"))
    command = [str(python), "-W", "ignore", *words]
    return subprocess.run(command, cwd=folder, env=ours, capture_output=True, text=True, check=False, timeout=600)


def two_steps(python: Path, folder: Path, written: str) -> dict[str, Any]:
    """Run two steps with the given configuration on the model in `base`; nothing may be lost. Return the summary."""
    (folder / "short.yaml").write_text(_SHORT)
    (folder / "run.yaml").write_text(f"extends: short.yaml\n{written}")
    run = call(python, folder, "-m", "streamrl.ops.cli.main", "up", "run.yaml", "--json")
    assert run.returncode == 0, run.stderr
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert (summary["steps"], summary["lost"], summary["twice"]) == (2, 0, 0)
    return summary


def _pins(folder: Path) -> tuple[str, str]:
    ours = sysconfig.get_path("purelib")
    theirs = next((folder / "lib").glob("python*")) / "site-packages"
    (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    frozen = _call("-m", "uv", "pip", "freeze", "--quiet", "--python", sys.executable)
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{line}\n" for line in frozen.splitlines() if "==" in line and "@" not in line))
    return "--constraints", str(pins)


def _install(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".ci" / "uv-install"), sys.executable, "--python", str(python), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def _call(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=240).stdout
