"""Like `sandbox_keeper`, as a user without files. Imports are preloaded: Python may be readable by root only."""

from __future__ import annotations

import _socket  # noqa: F401
import mmap  # noqa: F401
import os
import subprocess  # noqa: F401
import threading  # noqa: F401

from streamrl.workers.confined.sandbox_keeper import main

_NOBODY = 65534

if __name__ == "__main__":
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    main(step_back=lambda: None)
