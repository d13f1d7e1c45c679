"""What a worker may use is its own word; the run's configuration is data."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.permissions import Permissions, allowed_model


def test_the_workers_own_model_is_always_allowed() -> None:
    assert allowed_model("/runs/model", override="/mine", permissions=Permissions()) == "/mine"


def test_a_model_of_the_run_is_refused_with_the_flags_that_would_allow_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*--model .*--allow-model-root"):
        allowed_model(str(tmp_path), override=None, permissions=Permissions())


def test_a_model_under_an_allowed_root_is_allowed(tmp_path: Path) -> None:
    model = tmp_path / "sft"
    model.mkdir()
    permissions = Permissions(model_roots=(str(tmp_path),))
    assert allowed_model(str(model), override=None, permissions=permissions) == str(model)


def test_a_path_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError):
        allowed_model(f"{root}/../elsewhere", override=None, permissions=Permissions(model_roots=(str(root),)))


def test_hub_names_are_allowed_by_organisation() -> None:
    permissions = Permissions(model_roots=("Qwen",))
    assert allowed_model("Qwen/Qwen3-0.6B", override=None, permissions=permissions) == "Qwen/Qwen3-0.6B"
    with pytest.raises(ConfigError):
        allowed_model("Qwen-evil/model", override=None, permissions=permissions)
