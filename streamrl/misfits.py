"""Packages built for another torch than the installed one; streamrl treats them as not installed.

vLLM's CPU build requires torchvision and two more, for inputs that are not text. If an index has only their CUDA
builds, pip installs those beside a CPU build of torch. Then transformers, which imports whatever it finds of them,
dies: "operator torchvision::nms does not exist". Nothing here uses them. They are recognised by their files, without
imports.
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
_BUILD = re.compile(r"\+(cpu|rocm|xpu|cu\d\d)")  # for CUDA the major version, since minor ones are compatible
_PIN = re.compile(r"torch\s*\(?==\s*([\d.]+)")


@cache
def misfits() -> Mapping[str, str]:
    """Return why each misfit does not fit, by name."""
    torch = version("torch")
    problems = {}
    for name in _NAMES:
        found = version(name)
        if torch and found and not (_build(torch, found) and _pinned(torch, name)):
            problems[name] = f"{name} {found} does not fit torch {torch}"
    return problems


def do_without() -> None:
    """Hide misfits before anything imports transformers: None in `sys.modules` makes an import fail."""
    for name in misfits():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def version(name: str) -> str | None:
    """Return the version with its build, read from the package's version.py; the metadata may omit the build."""
    spec = PathFinder.find_spec(name)
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _build(*versions: str) -> bool:
    """Return whether all are of the same build, as far as they name it."""
    return len({found[1] for version in versions if (found := _BUILD.search(version))}) < 2


def _pinned(torch: str, name: str) -> bool:
    """Return whether this torch is the version that the package pins."""
    try:
        pins = [pin[1] for line in requires(name) or () if (pin := _PIN.match(line))]
    except PackageNotFoundError:
        return True
    return all(torch.startswith(pin) for pin in pins)
