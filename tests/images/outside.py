"""A worker's command outside of any container, on a host of its own: what image and container cost is the difference.

The words, variables and files are the pod's; the interpreter is this one. Its files lie where the pod has them by a
mount namespace of its own, but for those whose place this machine's root lacks: in words they are named where they lie.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers import wait_until
from tests.images.supplies import ROOT
from tests.manifest_world import Container
from tests.root.hosts import Hosts

# Under /run, and in memory of its own: nothing of it stays.
_MOUNTED = """
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
while [ "$1" != -- ]; do mkdir -p "$1"; mount --bind "$2" "$1"; shift 2; done
shift
exec "$@"
"""
_ASK = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5).read()"
_POLL_S = 1.0


def seconds_to_ready(
    world: Hosts, host: str, container: Container, laid: Mapping[str, Path], folder: Path, *, timeout_s: float
) -> float:
    """Of the container's command until its readiness probe passes; it has ended then."""
    places = {mount["mountPath"]: laid[mount["name"]] for mount in container.spec["volumeMounts"]}
    mounted = {path: place for path, place in places.items() if path.startswith("/run/")}
    elsewhere = {path: place for path, place in places.items() if path not in mounted}
    words = ["unshare", "--mount", "sh", "-ec", _MOUNTED, "sh"]
    words += [word for path, place in mounted.items() for word in (path, str(place))]
    words += ["--", *(named(word, elsewhere) for word in container.words)]
    folder.mkdir()
    own = {**container.variables, "HOME": str(folder), "TMPDIR": str(folder)}
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    process = world.start(host, words, {**here, "PYTHONUNBUFFERED": "1", **own})
    try:
        asked = [sys.executable, "-I", "-S", "-c", _ASK, f"http://127.0.0.1:{_port(container)}{_path(container)}"]
        wait_until(
            lambda: process.poll() is not None or world.ask(host, asked, {}).returncode == 0,
            description=f"the command of {host} is ready outside\n{world.log(host)[-3000:]}",
            timeout_s=timeout_s,
            poll_s=_POLL_S,
        )
        took_s = time.monotonic() - began
        assert process.poll() is None, world.log(host)[-3000:]
    finally:
        world.kill(host)
    return took_s


def named(word: str, places: Mapping[str, Path]) -> str:
    """Where its file lies; what stands there may begin like another of the pod's places."""
    for path, place in places.items():
        option, is_there, rest = word.partition(f"={path}")
        if is_there and rest[:1] in ("", "/"):
            return f"{option}={place}{rest}"
    return word


def _port(container: Container) -> int:
    wanted = container.spec["readinessProbe"]["httpGet"]["port"]
    return int(next(one["containerPort"] for one in container.spec["ports"] if one["name"] == wanted))


def _path(container: Container) -> str:
    return str(container.spec["readinessProbe"]["httpGet"]["path"])
