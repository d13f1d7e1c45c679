"""What a ticket is for; on its own, so that who only counts tickets need not load what reads them."""

from __future__ import annotations

from typing import Literal

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("train", "eval")
