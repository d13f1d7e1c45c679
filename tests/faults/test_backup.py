"""A run's folder is lost, and put back as it was some checkpoints ago, as docs/operations.md says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from streamrl.ops.audit import audit_folder
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.helpers import wait_until

NUM_COPIES = 10


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, num_prompts=5000, commit_every=1)


def copy(run_folder: Path, to: Path) -> None:
    """As `rsync -a` goes about it: by name, and what has gone meanwhile is left out."""
    for path in sorted(run_folder.iterdir()):
        if not path.is_dir():
            shutil.copy2(path, to / path.name)
            continue
        try:
            shutil.copytree(path, to / path.name)
        except shutil.Error as error:
            if any("No such file" not in why for _, _, why in error.args[0]):
                raise


def trained_until(world: FaultWorld, step: int) -> None:
    wait_until(lambda: world.newest_checkpoint().step >= step, description=f"checkpoint of step {step}")


@pytest.mark.parametrize("redis_is_lost", [False, True], ids=["Redis is ahead", "Redis is empty"])
def test_a_run_goes_on_from_its_backup(
    world: FaultWorld, client: redis.Redis, tmp_path: Path, redis_is_lost: bool
) -> None:
    backup = tmp_path / "backup"
    backup.mkdir()
    learner = world.start_learner()
    worker = world.start_worker()
    trained_until(world, 3)
    copy(world.place.run_folder, backup)
    for life in range(1, 4):  # each one a term of which the backup knows nothing
        trained_until(world, 3 + 2 * life)
        learner.kill()
        learner = world.start_learner()
    trained_until(world, 12)
    learner.kill()
    lost = world.newest_checkpoint()

    shutil.rmtree(world.place.run_folder)
    shutil.copytree(backup, world.place.run_folder)
    if redis_is_lost:
        worker.kill()
        client.flushall()
        world.start_worker()
    kept = world.newest_checkpoint()
    learner = world.start_learner()
    trained_until(world, lost.step + 2)
    set_control(client, world.keys, "drain", by="the test")
    learner.ends_with(0)
    assert kept.step < lost.step
    audit = world.audit()
    assert audit.clean, audit.to_json()
    assert audit.outstanding == 0


def test_a_copy_made_at_any_time_is_one_to_go_on_from(world: FaultWorld, tmp_path: Path) -> None:
    world.start_learner()
    world.start_worker()
    for number in range(NUM_COPIES):
        trained_until(world, world.newest_checkpoint().step + 1)
        backup = tmp_path / f"backup-{number}" / world.place.name
        backup.mkdir(parents=True)
        before = world.newest_checkpoint().step
        copy(world.place.run_folder, backup)
        assert main(["audit", str(backup), "--folder-only"]) == 0
        audit = audit_folder(backup)
        assert audit.step >= before - 1, "at most the checkpoint that was going while it was copied is missing"
        assert (audit.problems, audit.lost, audit.twice, audit.unproven) == ((), 0, 0, 0), audit.to_json()
