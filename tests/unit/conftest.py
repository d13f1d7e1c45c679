"""What unit tests share that need no server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """About settings that a family does not have."""
    import transformers  # half a second, for those who ask

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)
