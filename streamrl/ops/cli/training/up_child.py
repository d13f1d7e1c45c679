"""`streamrl up` as a child of a program that requested the run and follows its progress (`ops.python.launcher`).

The request arrives on stdin; progress is written as JSON lines. Functions in the request are written to the run's
folder before anything is tried; if the run does not begin, the folder is restored.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.errors import DataError, PartError, StreamrlError
from streamrl.files import LOCK, only_one, write_durably
from streamrl.ops.audit.commit import read_commit
from streamrl.ops.cli.main import refusal
from streamrl.ops.cli.training.up import start_or_resume
from streamrl.ops.launch.display import Frame
from streamrl.ops.launch.finished import finished_sentence
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.python.request import Request, pickle_path
from streamrl.process import ask_to_end_with, signals_to_end, take_stdout

_MODULE = "streamrl.ops.cli.training.up_child"  # as in its command line, whose last argument is the program's pid
_LOOK_EVERY_S = 0.5
Send = Callable[..., None]  # takes the kind of message, and its fields


def main() -> None:
    stdout = take_stdout()

    def send(kind: str, **fields: Any) -> None:
        with suppress(BrokenPipeError):  # the program is gone; the run still ends in order
            stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
            stdout.flush()

    ask_to_end_with(int(sys.argv[1]))
    try:
        run(Request.from_json(sys.stdin.read()), send)
    except StreamrlError as error:
        send("failed", type=type(error).__name__, error=str(error))
    except OSError as error:
        if (user_error := refusal(error)) is None:
            raise
        send("failed", type=type(user_error).__name__, error=str(user_error))


def run(request: Request, send: Send) -> None:
    """Run the request; raises the errors that `streamrl up` would print."""
    folder = load_config(request.config, request.overrides).config.folder
    loaded = load_config(request.config, (*request.overrides, *request.targets(folder)))
    while (pid := orphan_in(folder)) is not None:
        send(
            "doing",
            text=f"waiting for the previous launcher (pid {pid}): its program is gone, and it is ending the run ...",
        )
        time.sleep(_LOOK_EVERY_S)
    _check_nobody_runs(folder, loaded.config.name)
    undo = ExitStack()
    audience = PipeAudience(loaded.config, send, on_started=undo.pop_all)
    try:
        with _first_signal_interrupts(), undo:
            _write_functions(request, loaded.config, undo)
            outcome = start_or_resume(loaded, audience, takeover=request.takeover)
            if not isinstance(outcome, Remains):
                undo.pop_all()
    except KeyboardInterrupt:
        if not audience.has_begun:
            raise PartError("the launcher was asked to end before the run had begun") from None
        send("ended", state="stopped", steps=steps_saved(folder), summary=None)
        return
    if isinstance(outcome, Remains):
        new_functions = _new_functions(request, folder)
        send("said", text=finished_sentence(outcome, loaded.config.training, new_functions=new_functions))
        audience.report_start()
        send("ended", state="finished", steps=outcome.step, summary=outcome.summary)
    elif outcome.summary is None:
        send("ended", state="stopped", steps=0, summary=None)
    else:
        summary = outcome.summary.to_json()
        send("ended", state=summary["state"], steps=summary["steps"], summary=summary)


@contextmanager
def _first_signal_interrupts() -> Iterator[None]:
    """The first signal to end raises KeyboardInterrupt, as Ctrl-C does, so that the folder is restored; later ones do
    not disturb that. While the parts run, the launcher counts the signals itself (`Interrupts`)."""
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in signals_to_end()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


class PipeAudience:
    """The launcher's audience, at the other end of a pipe."""

    def __init__(self, config: schema.Config, send: Send, *, on_started: Callable[[], object]) -> None:
        self._config, self._send, self._on_started = config, send, on_started
        self._phase: str | None = None  # None: the processes do not run yet

    @property
    def has_begun(self) -> bool:
        return self._phase is not None

    def show(self, frame: Frame) -> None:
        if not self.has_begun:
            self.report_start()
        if frame.phase != self._phase:
            self._phase = frame.phase
            self._send("phase", text=frame.phase)

    def notify(self, text: str) -> None:
        self._send("said", text=text)

    def report_start(self) -> None:
        self._on_started()
        self._send("begun", name=self._config.name, folder=str(self._config.folder.absolute()))

    @contextmanager
    def checking(self) -> Iterator[Callable[[str], None]]:
        yield lambda text: self._send("doing", text=text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _check_nobody_runs(folder: Path, name: str) -> None:
    """Raise ResourceError if another launcher holds the folder: before the checks, which take a while."""
    if (folder / LOCK).exists():
        with only_one(folder, name):
            pass


def _new_functions(request: Request, folder: Path) -> list[str]:
    """Return the functions of the request that are pickled otherwise than those that the run has used."""
    stored = {name: pickle_path(name, folder) for name in request.functions}
    return [name for name, path in stored.items() if not path.is_file() or path.read_bytes() != request.functions[name]]


def _write_functions(request: Request, config: schema.Config, undo: ExitStack) -> None:
    """Write the functions to the run's folder."""
    for name, code in request.functions.items():
        path = pickle_path(name, config.folder)
        undo.callback(_restore, path, path.read_bytes() if path.exists() else None, config.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, code)


def _restore(path: Path, previous: bytes | None, folder: Path) -> None:
    if previous is not None:
        write_durably(path, previous)
        return
    path.unlink()
    with suppress(OSError):  # not empty
        path.parent.rmdir()
        folder.rmdir()


def steps_saved(folder: Path) -> int:
    """Return the steps in its newest checkpoint; 0 if it had not begun, or if the disk does not tell."""
    try:
        return read_commit(folder).step
    except (DataError, OSError):
        return 0


if __name__ == "__main__":
    main()
