"""What a rank tells its agent when no restart would help: end, and with which exit code.

torchrun knows no such word, and an agent that is ended by a signal ends with 1 whatever its ranks know. So the code
lies in a file of the agent's own, whose path its ranks have from it, and the signal comes after.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

_VARIABLE = "STREAMRL_AGENT_VERDICT"


def listen(folder: Path, environment: MutableMapping[str, str]) -> Path:
    """By an agent, before it starts its ranks: where the word will be."""
    file = folder / "verdict"
    environment[_VARIABLE] = str(file)
    return file


def heard(file: Path) -> int | None:
    """The code that a rank has told; None: none has."""
    return int(file.read_text()) if file.exists() else None


def tell(exit_code: int, environment: Mapping[str, str]) -> None:
    """By a rank; whoever runs ranks under another agent than ours does without."""
    if _VARIABLE in environment:
        Path(environment[_VARIABLE]).write_text(str(exit_code))
