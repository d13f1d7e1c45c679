"""podman in namespaces of its own: images, containers, mounts and processes that end with one process.

    holder ── unshare: mounts, processes, network (loopback alone)
      ├── podman build, run, exec        each entered by nsenter; storage in the test's folder
      └── conmon ── crun ── container    in the network namespace of its pod's host (tests/root/hosts.py)

Who kills the holder has killed all of them, so nothing outlives a test that was killed itself, but cgroups without
processes, which the next one removes. The second hierarchy of a machine that has both kinds of cgroups is not seen in
there: crun would take it for the only one. Blocks while podman works.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.helpers import wait_until

TOOLS = {"podman": "podman", "crun": "crun", "unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_CGROUPS = Path("/sys/fs/cgroup")
_TAG = re.compile(r"streamrl-images-(\d+)-[0-9a-f]{4}")
# Limits as a machine's own: podman's may be more than a root without CAP_SYS_RESOURCE can set.
_SETTINGS = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "crun"
"""
_HOLD = """
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
ip link set lo up
echo ready
exec sleep infinity
"""
_BUILD_S = 1200.0
_CALL_S = 120.0


def why_not(tools: Mapping[str, str] = TOOLS) -> str | None:
    """What is missing for images; None when nothing is."""
    if os.geteuid() != 0:
        return "it needs root: sudo make test-images"
    if missing := sorted({package for tool, package in tools.items() if shutil.which(tool) is None}):
        return f"install what it needs: apt-get install --no-install-recommends {' '.join(missing)}"
    return None


class Engine:
    def __init__(self, folder: Path) -> None:
        self.tag = f"streamrl-images-{os.getpid()}-{secrets.token_hex(2)}"
        self._folder = folder
        self._settings = folder / "containers.conf"
        self._holder: subprocess.Popen[str] | None = None
        self._inner = 0  # the holder's first process, whose end ends all others

    def open(self) -> None:
        _sweep(lambda pid: not Path(f"/proc/{pid}").exists())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._settings.write_text(_settings())
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc"]
        # What is mounted outside comes in, namespaces of networks among it; nothing gets out.
        words += ["--propagation", "slave", "--kill-child", "sh", "-ec", _HOLD]
        self._holder = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n", "no namespaces for podman here"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._inner = int(children[0])

    def close(self, *, keep_images: bool) -> None:
        """All of it, also where a part of it does not go; with the images where they are not to be kept."""
        with contextlib.ExitStack() as stack:
            if not keep_images:
                stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(_sweep, lambda pid: pid == os.getpid())
            stack.callback(self._end_holder)
            if self._holder:
                stack.callback(self.podman, "rm", "--all", "--force", "--time", "0")

    def left(self) -> list[str]:
        """What is still there of it but images: namespaces end with their processes, mounts with their namespace."""
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self._folder) in line]
        groups = [str(path) for path in _groups() if path.name == self.tag]
        processes = [f"process {pid}" for pid, words in command_lines() if str(self._folder) in words]
        return mounts + groups + processes

    def inside(self, *words: str, timeout_s: float = _CALL_S, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command among podman's mounts and processes."""
        enter = ["nsenter", "--mount", "--pid", "--net", "--target", str(self._inner)]
        environment = {"PATH": os.environ["PATH"], "CONTAINERS_CONF": str(self._settings)}
        done = subprocess.run(
            [*enter, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(words[:9])} …\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def podman(self, *words: str, timeout_s: float = _CALL_S, check: bool = True) -> subprocess.CompletedProcess[str]:
        storage = ["--root", str(self._folder / "storage"), "--runroot", str(self._folder / "state")]
        return self.inside("podman", *storage, *words, timeout_s=timeout_s, check=check)

    def runs(self, pid: int) -> bool:
        """A process, by its number among podman's; without a call of podman, which takes a tenth of a second."""
        return Path(f"/proc/{self._inner}/root/proc/{pid}").exists()

    # Images

    def build(self, file: Path, image: str, *words: str, context: Path, supplies: Path) -> None:
        """From a Dockerfile as it stands; nothing is fetched, for there is no network."""
        told = ["build", "--layers", "--isolation", "chroot", "--pull=never", "--volume", f"{supplies}:/supplies:ro"]
        ignored = file.with_name(f"{file.name}.dockerignore")
        told += ["--ignorefile", str(ignored)] if ignored.exists() else []
        self.podman(*told, *words, "--file", str(file), "--tag", image, str(context), timeout_s=_BUILD_S)

    def import_image(self, root: Path, image: str, variables: Mapping[str, str]) -> None:
        changes = [word for name, value in variables.items() for word in ("--change", f"ENV {name}={value}")]
        self.podman("import", "--quiet", *changes, str(root), image, timeout_s=_BUILD_S)

    def has_image(self, image: str) -> bool:
        return self.podman("image", "exists", image, check=False).returncode == 0

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.podman(kind, "inspect", name).stdout)
        return found[0]

    def _end_holder(self) -> None:
        if self._holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._inner, signal.SIGKILL)
        self._holder.wait(timeout=30)
        assert self._holder.stdout
        self._holder.stdout.close()
        self._holder = None


def command_lines() -> Iterator[tuple[int, str]]:
    """Of all processes on this machine, those in containers among them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace")


def _groups() -> Iterator[Path]:
    for hierarchy in _CGROUPS.iterdir():
        if hierarchy.is_dir():
            yield from (path for path in hierarchy.iterdir() if path.is_dir() and _TAG.fullmatch(path.name))


def _sweep(is_over: Callable[[int], bool]) -> None:
    """Cgroups of those that are over: they hold no process any more."""
    for path in _groups():
        tag = _TAG.fullmatch(path.name)
        if tag and is_over(int(tag[1])):
            wait_until(functools.partial(_removed, path), description=f"{path} has no process")


def _removed(group: Path) -> bool:
    """Those within it first."""
    for path in sorted((one for one in group.rglob("*") if one.is_dir()), key=lambda one: -len(one.parts)):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
    return not group.exists()


def _settings() -> str:
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return _SETTINGS.format(files=files, processes=processes)


@contextlib.contextmanager
def engine(folder: Path, *, keep_images: bool) -> Iterator[Engine]:
    made = Engine(folder)
    try:
        made.open()
        yield made
    finally:
        made.close(keep_images=keep_images)
