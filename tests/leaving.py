"""How ranks that tests start leave: like the learner's, which are forked, without taking the interpreter apart."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """With code 0. An interpreter that shuts down after several of gloo's groups were at work sometimes aborts
    ("terminate called without an active exception"), when all is done and written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
