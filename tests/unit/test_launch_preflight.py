"""Packages that must be there, and one launcher a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.errors import ResourceError
from streamrl.extras import need
from streamrl.files import only_one


def test_a_missing_package_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(ResourceError, match=r"worker.engine needs no_such_thing, not.*\[worker-cpu\]"):
        need("worker.engine", "json", "no_such_thing", extra="worker-cpu")


def test_a_folder_is_run_by_one_launcher_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    with (
        only_one(folder, "mine"),
        pytest.raises(ResourceError, match=rf"the run 'mine' is live: .*pid {os.getpid()}"),
        only_one(folder, "mine"),
    ):
        pass

    with only_one(folder, "mine"):
        assert (folder / "up.lock").read_text() == str(os.getpid())
