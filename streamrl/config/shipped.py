"""The configurations that streamrl ships: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path


def shipped_config(name: str) -> Path:
    return _folder() / name


def find_shipped(path: str | Path) -> Path | None:
    """Resolve `quickstart.yaml` or `conf/quickstart.yaml` if no such file exists; None if there is none."""
    name = Path(path).as_posix().removeprefix("conf/")
    return shipped_config(name) if name in _names() else None


def list_shipped() -> str:
    """List them, for an error about an unknown name."""
    return f"streamrl ships {', '.join(_names())}"


def _names() -> list[str]:
    return sorted(file.relative_to(_folder()).as_posix() for file in _folder().rglob("*.yaml"))


def _folder() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
