"""The configurations that streamrl ships: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

_CLOSE = 0.8  # all names have the suffix in common


def shipped_config(name: str) -> Path:
    return _folder() / name


def find_shipped(path: str | Path) -> Path | None:
    """Resolve `quickstart.yaml` or `conf/quickstart.yaml` if no such file exists; None if there is none."""
    name = Path(path).as_posix().removeprefix("conf/")
    return shipped_config(name) if name in _names() else None


def hint_at_shipped(path: str | Path) -> str:
    """Return the one that an unknown name probably means, else a list of them, for an error."""
    near = get_close_matches(Path(path).as_posix().removeprefix("conf/"), _names(), n=1, cutoff=_CLOSE)
    return f"did you mean {near[0]}?" if near else f"streamrl ships {', '.join(_names())}"


def _names() -> list[str]:
    return sorted(file.relative_to(_folder()).as_posix() for file in _folder().rglob("*.yaml"))


def _folder() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
