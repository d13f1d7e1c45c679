"""Packages that were built for another torch than the one beside them; to streamrl they are as if not installed.

vLLM's build for CPUs asks for torchvision and two more, for inputs that are not text. Where an index has only their
builds for CUDA, pip takes those beside a torch for CPUs. Then transformers, which imports what it finds of them, dies:
"operator torchvision::nms does not exist". Nothing here uses them. They are told by their files; nothing is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_NAMES = ("torchvision", "torchaudio", "torchcodec")
_BUILD = re.compile(r"\+(cpu|rocm|xpu|cu\d\d)")  # of CUDA the major version: the minor ones fit each other
_PIN = re.compile(r"torch\s*\(?==\s*([\d.]+)")


@cache
def misfits() -> Mapping[str, str]:
    """By name, how each does not fit."""
    torch = version("torch")
    told = {}
    for name in _NAMES:
        found = version(name)
        if torch and found and not (_build(torch, found) and _pinned(torch, name)):
            told[name] = f"{name} {found} does not fit torch {torch}"
    return told


def do_without() -> None:
    """Before anybody here imports transformers: None in `sys.modules` is Python's own word for `not installed`."""
    for name in misfits():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def version(name: str) -> str | None:
    """What torch and its kin say of themselves, the build included, which their metadata may leave out."""
    spec = PathFinder.find_spec(name)
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _build(*versions: str) -> bool:
    """Whether they are of one build, as far as they name it."""
    return len({found[1] for version in versions if (found := _BUILD.search(version))}) < 2


def _pinned(torch: str, name: str) -> bool:
    """Whether this is the torch that the package wants."""
    try:
        pins = [pin[1] for line in requires(name) or () if (pin := _PIN.match(line))]
    except PackageNotFoundError:
        return True
    return all(torch.startswith(pin) for pin in pins)
