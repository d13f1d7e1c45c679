"""The process that makes a library's prompts: a JSON object on stdin says which, and the file gets the rows.
`python -m streamrl.data.making FILE`.

A mistake of the user's is a line on stdout and the status `FAILED`. An item that takes longer than `STALL_S` ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl.extras import install
from streamrl.recipe.games import game_rows
from streamrl.recipe.reasoning import task_rows

FAILED = 2
STALL_S = 600
_TELL_EVERY_S = 2.0
_MAKERS: Mapping[str, Callable[..., Iterator[dict[str, Any]]]] = {"reasoning_gym": task_rows, "textarena": game_rows}


def main() -> None:
    wanted = json.load(sys.stdin)
    library = wanted.pop("library")
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    try:
        with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
            for row in _watched(_MAKERS[library](**wanted), name=wanted["name"], size=wanted["size"]):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except ImportError as error:  # of a package that was installed without its dependencies
        print(f"{library} cannot be imported ({error}): `{install(library.replace('_', '-'))}`", file=out)
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 - a library's own checks of its options raise what they like
        print(" ".join(str(error).split()) or type(error).__name__, file=out)
        sys.exit(FAILED)


def _watched(rows: Iterator[Mapping[str, Any]], *, name: str, size: int) -> Iterator[Mapping[str, Any]]:
    """Tells a terminal how far they are, where that takes its time."""
    told = time.monotonic()
    signal.alarm(STALL_S)
    for number, row in enumerate(rows, start=1):
        yield row
        signal.alarm(STALL_S)
        if sys.stderr.isatty() and time.monotonic() > told + _TELL_EVERY_S:
            told = time.monotonic()
            print(f"  {name}: {number} of {size} made", file=sys.stderr)


if __name__ == "__main__":
    main()
