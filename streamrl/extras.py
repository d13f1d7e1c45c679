"""Packages that only some machines have: what needs one says so before it begins, with the way to install it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from streamrl.errors import ResourceError


def is_installed(*packages: str) -> bool:
    """All of them; nothing is imported."""
    return not _missing(packages)


def need(what: str, *packages: str, extra: str, or_extra: str | None = None) -> None:
    """ResourceError when one of the packages is not installed; nothing is imported."""
    missing = _missing(packages)
    if missing:
        remedy = " or ".join(f"`pip install 'streamrl[{one}]'`" for one in (extra, or_extra) if one)
        raise ResourceError(f"{what} needs {' and '.join(missing)}, not installed here: {remedy}")


def _missing(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def check_learner() -> None:
    need("the learner", "torch", "transformers", extra="learner")
