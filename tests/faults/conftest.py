"""A run of stand-ins for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import FaultWorld
from tests.faults.place import Place


@pytest.fixture
def place(tmp_path: Path, run_name: str, redis_url: str) -> Place:
    """Overridden where a test needs another run."""
    return Place(folder=tmp_path, name=run_name, url=redis_url)


@pytest.fixture
def world(place: Place) -> Iterator[FaultWorld]:
    with FaultWorld(place) as world:
        yield world
