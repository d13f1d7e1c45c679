"""A process that imports modules, then forks into the programs requested on its stdin (`streamrl.ops.launch.forking`).

    python -m streamrl.ops.launch.fork_server MODULE ... [SPACES]

It reads programs from stdin, one per line, and further modules for later programs:

    {"number": 0, "name": NAME, "arguments": ["-m", "package.module", ...], "log": PATH, "environment": {...}}
    {"modules": [...]}

It writes `began NUMBER PID` for each program to stdout, and `ended NUMBER CODE`. Blocks on its stdin and on its
children, and ends when stdin is closed and they have ended.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from streamrl.process import change_environment, die_with_parent, threads_in


def main() -> None:
    _import(" ".join(sys.argv[1:]).split())
    if (become := _serve()) is not None:
        become()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            import_module(module)
        except Exception:  # noqa: BLE001 - the program that imports it will report it, and others need none of it
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # otherwise the first garbage collection in a program would copy every shared page


def _serve() -> Callable[[], None] | None:
    """Return in each forked program the function to run; in the server None, at the end."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)  # wakes `select` when a child ends
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    server_pid, incomplete, is_open = os.getpid(), b"", True
    while is_open or numbers:
        ready, _, _ = select.select([woken, *([sys.stdin.fileno()] if is_open else [])], [], [])
        if woken in ready:
            os.read(woken, 512)
            _report_ended(numbers)
            continue
        read = os.read(sys.stdin.fileno(), 1 << 16)
        is_open = bool(read)
        *lines, incomplete = (incomplete + read).split(b"\n")
        for request in map(json.loads, lines):
            if "modules" in request:
                _import(request["modules"])
                continue
            try:
                pid = os.fork()
            except OSError as error:  # there is no room for a process, perhaps for a moment: other programs run on
                _refuse(request, error)
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                return partial(_become, request, parent=server_pid)
            numbers[pid] = request["number"]
            print("began", request["number"], pid, flush=True)
    return None


def _refuse(program: Mapping[str, Any], error: OSError) -> None:
    with suppress(OSError), open(program["log"], "a") as log:
        print(f"{program['name']} could not be started: {error}", file=log)
    print("ended", program["number"], 1, flush=True)


def _report_ended(numbers: dict[int, int]) -> None:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        print("ended", numbers.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def _become(program: Mapping[str, Any], *, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    os.setsid()
    _show_as(program["name"], program["arguments"])
    log = program["log"]
    stdin, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor, replacement in ((0, stdin), (1, output), (2, output)):
        os.dup2(replacement, descriptor)
    os.close(stdin)
    os.close(output)
    change_environment(program["environment"])
    _take_threads()
    option, module, *words = program["arguments"]
    assert option == "-m", "programs are modules"
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show_as(name: str, arguments: Sequence[str]) -> None:
    """Have `ps` show the program's own command line, where vLLM has brought what that takes; else only its name."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join([sys.executable, *arguments]))
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(name)


def _take_threads() -> None:
    """Give torch the threads of this program's environment; else it keeps those of its import."""
    if (torch := sys.modules.get("torch")) is not None and (threads := threads_in(os.environ)):
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
