"""The process that generates a library's prompts: reads a JSON object from stdin, and writes the rows to the file.
`python -m streamrl.data.making FILE`.

A user's mistake becomes a line on stdout and the exit status `FAILED`. An item that takes longer than `STALL_S` ends
it.
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
_REPORT_EVERY_S = 2.0
_MAKERS: Mapping[str, Callable[..., Iterator[dict[str, Any]]]] = {"reasoning_gym": task_rows, "textarena": game_rows}


def main() -> None:
    wanted = json.load(sys.stdin)
    library = wanted.pop("library")
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print anything
    try:
        with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
            for row in _watched(_MAKERS[library](**wanted), name=wanted["name"], size=wanted["size"]):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except ImportError as error:  # the package was installed without its dependencies
        print(f"{library} cannot be imported ({error}): `{install(library.replace('_', '-'))}`", file=out)
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 - a library's own checks of its options may raise anything
        print(" ".join(str(error).split()) or type(error).__name__, file=out)
        sys.exit(FAILED)


def _watched(rows: Iterator[Mapping[str, Any]], *, name: str, size: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows; if that takes long, report progress on a terminal."""
    last_report = time.monotonic()
    signal.alarm(STALL_S)
    for number, row in enumerate(rows, start=1):
        yield row
        signal.alarm(STALL_S)
        if sys.stderr.isatty() and time.monotonic() > last_report + _REPORT_EVERY_S:
            last_report = time.monotonic()
            print(f"  {name}: {number} of {size} made", file=sys.stderr)


if __name__ == "__main__":
    main()
