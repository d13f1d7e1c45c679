"""One thing that is wrong with a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    key: str
    remedy: str  # what is wrong with it and what would be right
    value: Any = None  # what to show in the place of the setting's own value
