"""Runs a dashboard in its own process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def showing(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the URL that it prints, without its token."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^\s#]+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.terminate()
            process.wait(10)
