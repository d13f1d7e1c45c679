"""Checkpoints as ranks write them together: each tells of its own file, and none hurries the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamrl.config import schema
from streamrl.crashpoints import Point, armed
from streamrl.learner.checkpoints.checkpoint import MANIFEST, describe
from streamrl.learner.checkpoints.save import Saver
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.model.load import TokenizerInfo, load_policy, read_tokenizer_info
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.learner.rank import work
from streamrl.learner.rank_context import at_disk_s, stall_limit_s
from streamrl.learner.replayed import Unpublished
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from tests.conductor_world import ALONE, Scene, start_of, surroundings
from tests.feed_world import Clock
from tests.learner_cases import learner_config
from tests.tiny_models import make_model

CPU = torch.device("cpu")
EPOCH_1 = CheckpointName(1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithAnother(World):
    """Rank 0's view of two ranks, of which the other one tells this of its file."""

    told: bytes
    agrees: bool = True

    def all_agree(self, mine: bool) -> bool:
        return mine and self.agrees

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.told]


def make_saver(scene: Scene, world: World) -> Saver:
    scene.checkpoints.claim_term("run")
    policy = nn.Linear(3, 2)
    return Saver(
        policy=policy,
        optimizer=torch.optim.AdamW(policy.parameters()),
        world=world,
        checkpoints=scene.checkpoints,
        conductor=scene.conductor,
        term=1,
    )


def files_of(scene: Scene) -> dict[str, Any]:
    manifest = json.loads((scene.checkpoints.folder_of(EPOCH_1) / MANIFEST).read_bytes())
    found: dict[str, Any] = manifest["content"]["files"]
    return found


def test_the_manifest_has_what_each_rank_tells_of_its_file_and_rank_0_reads_none_of_the_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    told = {"train-00001-of-00002.safetensors": [84, "what the other rank has found"]}  # and not seen on this machine
    world = WithAnother(rank=0, size=2, device=CPU, told=json.dumps(told).encode())
    assert make_saver(scene, world).save(5, consumed_samples=0)
    mine = scene.checkpoints.folder_of(EPOCH_1) / "train-00000-of-00002.safetensors"
    assert files_of(scene) == {mine.name: list(describe(mine)), **told}


def test_a_checkpoint_that_one_rank_could_not_write_is_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    world = WithAnother(rank=0, size=2, device=CPU, told=b"", agrees=False)
    assert not make_saver(scene, world).save(5, consumed_samples=0)
    assert list((scene.folder / "checkpoints").iterdir()) == []


def test_what_was_saved_is_found_again_with_its_digests(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    saver = make_saver(scene, ALONE)
    assert [saver.save(5, consumed_samples=0) for _ in range(2)] == [True, True]
    found = scene.checkpoints.newest_complete(ancestry(scene.folder))
    assert found is not None
    assert found.name == EPOCH_1
    assert set(files_of(scene)) == {"train-00000-of-00001.safetensors"}


class SlowTokenizer:
    """Is written for so long that the clock goes on."""

    def __init__(self, tokenizer_info: TokenizerInfo, write: Callable[[], None]) -> None:
        self._tokenizer, self._write = tokenizer_info.tokenizer, write

    def save_pretrained(self, folder: Path) -> None:
        self._write()
        self._tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("slow", ["checkpoint", "export"])
@pytest.mark.parametrize(("takes_s", "ends"), [(1000.0, False), (3000.0, True)])
def test_a_rank_at_the_disk_is_not_stalled_before_the_disks_own_timeout(
    tmp_path: Path, slow: str, takes_s: float, ends: bool
) -> None:
    clock, stalls = Clock(), list[str]()

    def disk() -> None:
        clock.advance(takes_s)
        threading.Event().wait(0.1)  # the watchdog looks every hundredth second

    def at_point(point: Point) -> None:
        if slow == "checkpoint" and point == "checkpoint.synced":
            disk()

    config = learner_config(make_model(tmp_path / "model", hidden=32), dir=tmp_path)
    scene = Scene(tmp_path, max_steps=0)
    tokenizer_info = read_tokenizer_info(config.model.path)
    tokenizer: Any = SlowTokenizer(tokenizer_info, disk) if slow == "export" else tokenizer_info.tokenizer
    watchdog = Watchdog(
        limit_s=stall_limit_s(config),
        at_disk_s=at_disk_s(config),
        clock=clock,
        check_every_s=0.01,
        on_stall=stalls.append,
    )
    around = surroundings(config, tokenizer_info=replace(tokenizer_info, tokenizer=tokenizer), watchdog=watchdog)
    start = start_of(term=scene.checkpoints.claim_term("run").number)
    stream = LearnerStreamDouble(MemoryServer(wait=clock.advance), term=1)
    policy = load_policy(config, ALONE, tokenizer_info.end_ids)
    with armed(at_point):
        state = work(around, policy, start, conductor=scene.conductor, stream=stream, publisher=Unpublished(1))
    assert state == "finished"
    assert bool(stalls) is ends


def test_the_disk_has_its_own_timeout_beside_the_time_that_redis_may_be_away(tmp_path: Path) -> None:
    config = learner_config(tmp_path, checkpoint=schema.Checkpoint(timeout_s=7.0))
    assert (stall_limit_s(config), at_disk_s(config)) == (300.0, 307.0)
