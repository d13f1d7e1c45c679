"""Configurations without a mistake, and what is told of them once a setting is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.errors import ConfigError

GOOD = """\
model: {path: m}
data: {train: x.jsonl, validation: y.jsonl}
rewards:
  exact: {type: function, target: exact_match}
"""
BASE = """\
model: {path: base}
data:
  train: x.jsonl
rewards:
  exact: {type: function, target: exact_match}
"""
_CONF = Path(__file__).parents[1] / "conf"
SHIPPED = f"streamrl ships {', '.join(sorted(str(path.relative_to(_CONF)) for path in _CONF.rglob('*.yaml')))}"


def error_of(path: str, *overrides: str) -> str:
    """Why the file cannot be loaded with these overrides."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def problems(path: Path, *overrides: str) -> list[str]:
    """What is found, without places."""
    config = load_config(path, overrides).config
    try:
        check_config(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []
