"""A configuration without contradictions, and what is found once settings of it are changed."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.errors import ConfigError

GOOD = """\
model: {path: m}
data: {train: x.jsonl, validation: y.jsonl}
rewards:
  exact: {type: function, target: exact_match}
"""


def problems(path: Path, *overrides: str) -> list[str]:
    """What is found, without places."""
    config = load_config(path, overrides).config
    try:
        check_config(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []
