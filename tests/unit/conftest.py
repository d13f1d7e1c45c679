"""What unit tests share that need no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config_world import BASE, GOOD


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """About settings that a family does not have."""
    import transformers  # half a second, for those who ask

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A configuration without a mistake."""
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a `base.yaml` without a mistake."""
    monkeypatch.chdir(tmp_path)  # so that errors show short paths
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path
