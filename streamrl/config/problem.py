"""One thing that is wrong with a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    key: str
    value: Any
    remedy: str  # what is wrong with it and what would be right
