"""A thread beside the loop, which lives exactly as long as the block that it accompanies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def companion(target: Callable[[], None], *, name: str, stopped: threading.Event) -> Iterator[None]:
    """Run `target` meanwhile. It must look at `stopped`, which leaving sets, and bound whatever else it waits for."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
