"""Optional packages: checks that they are installed before work starts, with an error that says how to install them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from streamrl.errors import ResourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that does not work without these packages, and the extra that installs them."""

    what: str
    packages: tuple[str, ...]
    extra: str
    or_extra: str | None = None  # another extra that does


LEARNER = Need(what="the learner", packages=("torch", "transformers"), extra="learner")


def is_installed(*packages: str) -> bool:
    """Return whether all are installed, without importing them."""
    return not _missing(packages)


def need(what: str, *packages: str, extra: str, or_extra: str | None = None) -> None:
    """ResourceError if one of the packages is not installed; imports nothing."""
    need_all([Need(what=what, packages=packages, extra=extra, or_extra=or_extra)])


def need_all(needs: Iterable[Need]) -> None:
    """ResourceError that names everything that is not installed, and the one command for all of it; imports nothing."""
    lacking = [(one, missing) for one in needs if (missing := _missing(one.packages))]
    if not lacking:
        return
    said = ", ".join(f"{one.what} needs {' and '.join(missing)}" for one, missing in lacking)
    first = ",".join(dict.fromkeys(one.extra for one, _ in lacking))
    other = ",".join(dict.fromkeys(one.or_extra or one.extra for one, _ in lacking))
    remedy = " or ".join(f"`{install(extras)}`" for extras in dict.fromkeys([first, other]))
    raise ResourceError(f"{said}, not installed here: {remedy}")


def _missing(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def install(extra: str) -> str:
    """Return the command that adds an extra, or several with commas between them, to this installation, from its
    origin: streamrl is on no registry.
    """
    return installs(_origin(), extra)


def installs(origin: str | None, extra: str) -> str:
    """Build the command from the installer's record of the origin (`direct_url.json`, PEP 610); None: an index."""
    if origin is None:
        return f"pip install 'streamrl[{extra}]'"
    noted = json.loads(origin)
    if noted.get("dir_info", {}).get("editable"):
        return f"pip install -e '{url2pathname(urlsplit(noted['url']).path)}[{extra}]'"
    system = f"{noted['vcs_info']['vcs']}+" if "vcs_info" in noted else ""
    return f"pip install 'streamrl[{extra}] @ {system}{noted['url']}'"


def _origin() -> str | None:
    try:
        return distribution("streamrl").read_text("direct_url.json")
    except PackageNotFoundError:  # a checkout on the path that is not installed
        return json.dumps({"url": Path(__file__).parents[1].as_uri(), "dir_info": {"editable": True}})
