"""A process that imports modules, and then becomes the programs that it is told of (`streamrl.demos.forking`).

    python -m streamrl.demos.fork_server MODULE ...

On stdin [{"arguments": ["-m", "package.module", ...], "log": PATH}, ...], on stdout `NUMBER CODE` of each that has
ended. Blocks on its stdin, and then on its children.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from streamrl.process import die_with_parent


def main() -> None:
    for module in sys.argv[1:]:
        with suppress(ImportError):  # the program that needs it says so
            import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection in a program would copy every page that they share
    numbers: dict[int, int] = {}
    us = os.getpid()
    for number, program in enumerate(json.load(sys.stdin)):
        pid = os.fork()
        if pid == 0:
            _become(program["arguments"], program["log"], parent=us)
            return
        numbers[pid] = number
    while numbers:
        pid, status = os.wait()
        print(numbers.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def _become(arguments: Sequence[str], log: str, *, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the process that wanted this one has ended")
    nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor, instead in ((0, nothing), (1, said), (2, said)):
        os.dup2(instead, descriptor)
    option, module, *words = arguments
    assert option == "-m", "programs are modules"
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
