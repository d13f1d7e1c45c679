"""Data for supervised training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
