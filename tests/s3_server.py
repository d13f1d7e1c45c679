"""An S3 server on this machine, with a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.process import free_port
from tests.helpers import wait_until

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "blobs"


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """Yield its endpoint."""
    port = free_port("127.0.0.1")
    endpoint = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: _makes_bucket(endpoint), timeout_s=240, description="an S3 server with a bucket")
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _makes_bucket(endpoint: str) -> bool:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
