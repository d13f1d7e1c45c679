"""Packages that only some machines have: what needs one says so before it begins, with the way to install it."""

from __future__ import annotations

import importlib.util

from streamrl.errors import ResourceError


def need(what: str, *packages: str, extra: str, or_extra: str | None = None) -> None:
    """ResourceError when one of the packages is not installed; nothing is imported."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        remedy = " or ".join(f"`pip install 'streamrl[{one}]'`" for one in (extra, or_extra) if one)
        raise ResourceError(f"{what} needs {' and '.join(missing)}, not installed here: {remedy}")


def check_learner() -> None:
    need("the learner", "torch", "transformers", extra="learner")
