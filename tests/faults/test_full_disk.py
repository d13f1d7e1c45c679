"""T12: the disk is full while checkpoints are written, and when a rank that has died comes again. Nothing is gone on
from that is not whole, and once there is room the run goes on by itself.

    tmpfs   a small disk of its own, filled by somebody else: what a full disk really says (root)
    limit   no file of the rank may grow beyond half a checkpoint: anybody may set that, and writing fails half-way

Of the weights' disk tells test_weights_faults, of Redis' own test_connection.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import redis

from streamrl.config import schema
from streamrl.files import only_one
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.ops.audit import audit_folder
from streamrl.ops.cli.main import refusal
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from tests.faults.agents import PATIENCE_S, end, ranks, wasted_steps
from tests.faults.report import report
from tests.helpers import wait_until
from tests.integration.learner_world import made_up_worker, make_run, output, running_learner

pytestmark = pytest.mark.timeout(600)

_DISK_BYTES = 16 << 20
_EVERY_STEPS = 3


class Disk(Protocol):
    @property
    def folder(self) -> Path:
        """Where runs are."""

    def fill(self, *, rank: int, leave: int) -> None:
        """So that less than `leave` more bytes of a file get in."""

    def make_room(self, *, rank: int) -> None: ...


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, *, rank: int, leave: int) -> None:
        with (self.folder / "others").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * (64 << 10))
            except OSError:
                file.truncate(max(0, file.tell() - leave))

    def make_room(self, *, rank: int) -> None:
        (self.folder / "others").unlink()


class SmallFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, *, rank: int, leave: int) -> None:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (leave, resource.RLIM_INFINITY))

    def make_room(self, *, rank: int) -> None:
        """A rank that was killed has none any more."""
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(
    params=[pytest.param("tmpfs", marks=pytest.mark.root), pytest.param("limit", marks=pytest.mark.long)],
)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "limit":
        yield SmallFiles(tmp_path / "runs")
        return
    with small_disk(tmp_path / "disk") as made:
        yield made


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Run:
    """As one sees it from outside: its log is elsewhere, and how far it is stands in Redis too."""

    def __init__(self, disk: Disk, tmp_path: Path, name: str, client: redis.Redis) -> None:
        self.config = make_run(
            tmp_path,
            name=name,
            dir=disk.folder,
            num_prompts=10_000,
            training=schema.Training(groups_per_step=4, max_steps=10_000),
            checkpoint=schema.Checkpoint(every_steps=_EVERY_STEPS),
        )
        (self.config.folder / "learner.out").symlink_to(tmp_path / "learner.out")
        self._client = client

    def step(self) -> int:
        return max((record.step for record in snapshot(self._client, Keys(self.config.name)).records), default=0)

    def await_steps(self, count: int) -> None:
        """That many more."""
        first = self.step()
        wait_until(
            lambda: self.step() >= first + count,
            description=f"{count} steps after {first}\n{output(self.config)[-3000:]}",
            timeout_s=PATIENCE_S,
        )

    def checkpoint(self) -> CheckpointName | None:
        """The newest whole one, every byte of it looked at."""
        root, lineage = CheckpointRoot(self.config.folder), ancestry(self.config.folder)
        if not root.names(lineage):
            return None
        newest = root.newest_complete(lineage)
        assert newest is not None
        return newest.name

    def await_checkpoint(self, *, after: CheckpointName | None = None) -> CheckpointName:
        return wait_until(
            lambda: (name := self.checkpoint()) != after and name,
            description=f"a checkpoint after {after}\n{output(self.config)[-3000:]}",
            timeout_s=PATIENCE_S,
        )

    def await_checkpoint_that_stays(self, last: CheckpointName) -> CheckpointName:
        """Two more are due after it, while the disk is full; one that was written just before still counts, which the
        loop notices at the next step."""
        self.await_steps(2)
        before = self.checkpoint() or last
        self.await_steps(2 * _EVERY_STEPS)
        assert self.checkpoint() == before, "the disk was not full"
        return before

    def num_bytes(self, name: CheckpointName) -> int:
        [path] = (self.config.folder / "checkpoints" / str(name)).glob("train-*.safetensors")
        return path.stat().st_size


def test_a_full_disk_costs_checkpoints_and_never_a_whole_one(
    disk: Disk, tmp_path: Path, redis_url: str, run_name: str, client: redis.Redis
) -> None:
    run = Run(disk, tmp_path, run_name, client)
    config = run.config
    with made_up_worker(config, redis_url), running_learner(config, redis_url, processes=1) as agent:
        first = run.await_checkpoint()
        size = run.num_bytes(first)
        [rank] = ranks(agent, number=1)

        disk.fill(rank=rank, leave=size // 2)  # it fails half-way, and again
        before = run.await_checkpoint_that_stays(first)
        disk.make_room(rank=rank)
        after = run.await_checkpoint(after=before)
        assert after.term == first.term, "it went on by itself, without a restart"

        disk.fill(rank=rank, leave=min(size // 2, 1))  # and it dies before there is room
        before = run.await_checkpoint_that_stays(after)
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        if isinstance(disk, SmallDisk):
            wait_until(lambda: "no disk space to start" in output(config), description="it waits", timeout_s=PATIENCE_S)
            disk.make_room(rank=rank)
        last = run.await_checkpoint(after=before)
        recovery_s = time.monotonic() - began
        end(agent)
    assert last.term == first.term + 1
    loaded = ancestry(config.folder).last_steps[first.term]
    assert loaded == before.step, "it went on from another checkpoint than the newest whole one"
    audit = audit_folder(config.folder, redis_url=redis_url)
    name = f"T12 checkpoint {'tmpfs' if isinstance(disk, SmallDisk) else 'limit'}"
    report(name, audit, injections=2, recovery_s=recovery_s, wasted_steps=wasted_steps(config), corrupt_loaded=0)


@pytest.mark.root
def test_a_launcher_names_the_file_for_which_its_disk_has_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill(rank=0, leave=0)

        with pytest.raises(OSError, match="No space left on device") as full, only_one(disk.folder, "mine"):
            pass

    assert str(refusal(full.value)) == f"{disk.folder / 'up.lock'}: No space left on device"
