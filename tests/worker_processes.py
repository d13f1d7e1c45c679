"""`python -m workers` as processes: started, observed from outside, and never left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.weights_world import RUN_UID

ROOT = Path(__file__).resolve().parents[1]


class Workers:
    """Starts workers of one run, and ends all of them."""

    def __init__(self, folder: Path, url: str, run: str) -> None:
        self._folder, self._url, self._run = folder, url, run
        self._processes: list[subprocess.Popen[bytes]] = []
        self.name = f"test-{os.getpid()}-{run}"  # unique: mirrors are shared with other test suites on this machine
        self.temporary = tempfile.mkdtemp(prefix="workers-", dir="/tmp")  # a short path, for sockets

    def start(
        self,
        *arguments: str,
        number: int = 0,
        program: Sequence[str] = ("-m", "workers"),
        leads_group: bool = False,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """`program`: what Python runs; `variables`: of its environment; `leads_group`: of processes, its own."""
        worker_id = f"{self.name}-{number}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": self.temporary,
            **variables,
        }
        command = [sys.executable, *program, "--redis", self._url, "--run", self._run]
        command += ["--worker-id", worker_id, "--log-file", str(self._folder / f"worker-{number}.log"), *arguments]
        with self.stderr(number).open("ab") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stderr, stderr=stderr, start_new_session=leads_group
            )
        self._processes.append(process)
        return process

    def stderr(self, number: int = 0) -> Path:
        return self._folder / f"worker-{number}.err"

    def left_behind(self) -> list[Path]:
        """Return mirrors, and the contents of the folder for temporary files."""
        return [*self._mirrors(), *Path(self.temporary).iterdir()]

    def _mirrors(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"streamrl-mirror-{RUN_UID}-{self.name}-*"))

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for folder in (*self._mirrors(), self.temporary):
            shutil.rmtree(folder)


def descendants(pid: int) -> set[int]:
    """Return all processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def shared_by(pids: set[int]) -> set[Path]:
    """Return the named shared memory that any of these processes maps."""
    found: set[Path] = set()
    for pid in alive(pids):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return found
