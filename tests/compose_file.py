"""docker/compose.yaml with its variables interpolated as compose does."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.manifest_world import ROOT

FILE = ROOT / "docker" / "compose.yaml"


def interpolated(text: str, given: Mapping[str, str]) -> str:
    """Replace ${NAME}, ${NAME:-default}, ${NAME:?}, and $$ for a dollar."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else given.get(found["name"]) or found["default"] or ""

    return re.sub(r"\$\$|\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?)?\}", value, text)
