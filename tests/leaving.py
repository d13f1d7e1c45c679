"""How ranks started by tests exit: like the learner's forked ranks, without shutting the interpreter down."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """Exit with code 0. An interpreter that shuts down after several gloo groups were used sometimes aborts ("terminate
    called without an active exception") when all work is done and written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
