"""`streamrl up` as a child of a program that requested the run and follows its progress (`ops.python.launcher`).

The request arrives on stdin; progress is written as JSON lines. Functions in the request are written to the run's
folder before anything is tried; if the run does not begin, the folder is restored.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.errors import DataError, StreamrlError
from streamrl.files import LOCK, only_one, write_durably
from streamrl.ops.audit.folder import read_commit
from streamrl.ops.cli.main import refusal
from streamrl.ops.cli.up import take_up
from streamrl.ops.launch.display import Shown
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.python.request import Request, pickle_of
from streamrl.process import ask_to_end_with, take_stdout

_MODULE = "streamrl.ops.cli.beside"  # as in its command line, whose last argument is the program's pid
_LOOK_EVERY_S = 0.5
Tell = Callable[..., None]  # the kind of message, and its fields


def main() -> None:
    lines = take_stdout()

    def tell(kind: str, **told: Any) -> None:
        with suppress(BrokenPipeError):  # the program is gone; the run still ends in order
            lines.write(json.dumps({"kind": kind, **told}) + "\n")
            lines.flush()

    ask_to_end_with(int(sys.argv[1]))
    try:
        run(Request.from_json(sys.stdin.read()), tell)
    except StreamrlError as error:
        tell("failed", type=type(error).__name__, error=str(error))
    except OSError as error:
        if (refused := refusal(error)) is None:
            raise
        tell("failed", type=type(refused).__name__, error=str(refused))


def run(request: Request, tell: Tell) -> None:
    """Run the request; raises the errors that `streamrl up` would print."""
    folder = load_config(request.config, request.overrides).config.folder
    loaded = load_config(request.config, (*request.overrides, *request.targets(folder)))
    while (ending := orphan_in(folder)) is not None:
        tell("doing", text=f"waiting for the launcher before, pid {ending}, whose program is gone: it ends the run ...")
        time.sleep(_LOOK_EVERY_S)
    with ExitStack() as undo:
        _place(request, loaded.config, undo)
        teller = Teller(loaded.config, tell, on_begun=undo.pop_all)
        try:
            outcome = take_up(loaded, teller, takeover=request.takeover)
        except KeyboardInterrupt:
            tell("ended", state="stopped", steps=_steps_kept(folder), summary=None)
            return
        if not isinstance(outcome, Remains):
            undo.pop_all()
    if isinstance(outcome, Remains):
        teller.begun()
        tell("ended", state="finished", steps=outcome.step, summary=outcome.summary)
    elif outcome.summary is None:
        tell("ended", state="stopped", steps=0, summary=None)
    else:
        summary = outcome.summary.to_json()
        tell("ended", state=summary["state"], steps=summary["steps"], summary=summary)


def orphan_in(folder: Path) -> int | None:
    """Return the pid of a launcher in this folder that is ending because its program is gone, or None.

    Most often the program is a notebook kernel that was restarted. The launcher ends within a time limit.
    """
    with suppress(OSError, ValueError):  # no folder, no launcher, or it has just ended
        pid = int((folder / LOCK).read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return pid if _MODULE.encode() in words and words[-1].decode() != parent else None
    return None


class Teller:
    """The launcher's audience, at the other end of a pipe."""

    def __init__(self, config: schema.Config, tell: Tell, *, on_begun: Callable[[], object]) -> None:
        self._config, self._tell, self._on_begun = config, tell, on_begun
        self._phase: str | None = None  # None: the processes do not run yet

    def show(self, shown: Shown) -> None:
        if self._phase is None:
            self.begun()
        if shown.phase != self._phase:
            self._phase = shown.phase
            self._tell("phase", text=shown.phase)

    def say(self, text: str) -> None:
        self._tell("said", text=text)

    def begun(self) -> None:
        self._on_begun()
        self._tell("begun", name=self._config.name, folder=str(self._config.folder.absolute()))

    @contextmanager
    def checking(self) -> Iterator[Callable[[str], None]]:
        yield lambda text: self._tell("doing", text=text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _place(request: Request, config: schema.Config, undo: ExitStack) -> None:
    """Write the functions to the run's folder, unless another launcher holds it."""
    if not request.functions:
        return
    if (config.folder / LOCK).exists():
        with only_one(config.folder, config.name):
            pass
    for name, code in request.functions.items():
        path = pickle_of(name, config.folder)
        undo.callback(_put_back, path, path.read_bytes() if path.exists() else None, config.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, code)


def _put_back(path: Path, before: bytes | None, folder: Path) -> None:
    if before is not None:
        write_durably(path, before)
        return
    path.unlink()
    with suppress(OSError):  # not empty
        path.parent.rmdir()
        folder.rmdir()


def _steps_kept(folder: Path) -> int:
    try:
        return read_commit(folder).step
    except DataError:  # it had not begun
        return 0


if __name__ == "__main__":
    main()
