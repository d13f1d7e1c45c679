"""What hatchling builds from the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def built(source: Path, into: Path, what: str) -> Path:
    """Build in a separate process, since hatchling builds the working directory."""
    program = f"from hatchling import build; print(build.build_{what}({str(into)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=240, check=True
    )
    return into / done.stdout.split()[-1]
