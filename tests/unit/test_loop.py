"""The loop of a rank: what it records, and what it keeps where weights cannot be published any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import NotPublished
from streamrl.learner.checkpoints.terms import ancestry
from streamrl.learner.groups.plan import Kind, Plan, ReadyGroup
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.publishing.shipping import Published
from streamrl.learner.publishing.unpublished import Unpublished
from streamrl.learner.rank import work
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from streamrl.protocol.wire.group import decode_header, encode_group
from streamrl.telemetry.progress import Progress, Wait
from tests.conductor_world import ALONE, Scene, start_of, surroundings
from tests.feed_world import Clock
from tests.learner_cases import group_of, learner_config
from tests.tiny_models import make_model


class GivesUp(Unpublished):
    """Gives up at this call of `settle`, and not again at the next one: an attempt may be under way by then."""

    def __init__(self, at: int) -> None:
        super().__init__(term=1)
        self._left = at

    def settle(self, *, wait_s: float = 0.0) -> Published | None:
        self._left -= 1
        if self._left == 0:
            raise NotPublished("no weights could be published for 301 s")
        return None


def planned(num_groups: int) -> Plan:
    entries = []
    for number in range(num_groups):
        header, body = encode_group(group_of(rewards=[0.0, 1.0], ticket=number))
        entries.append(ReadyGroup(f"{number}-0", decode_header(header), body).planned(rank=0))
    return Plan(kind=Kind.STEP, step=0, entries=tuple(entries))


@pytest.mark.parametrize(
    ("at", "num_steps"),
    [
        (1, 0),  # before the first step
        (2, 1),  # within it, when its weights are to be sent
        (3, 1),  # after it
    ],
)
def test_a_run_that_gives_up_publishing_saves_first(tmp_path: Path, at: int, num_steps: int) -> None:
    config = learner_config(make_model(tmp_path / "model", hidden=32), dir=tmp_path)
    scene = Scene(tmp_path, planned(2))
    tokenizer_info = read_tokenizer_info(config.model.path)
    with pytest.raises(NotPublished, match="no weights could be published for 301 s"):
        work(
            surroundings(config, tokenizer_info=tokenizer_info),
            load_policy(config, ALONE, tokenizer_info.end_ids),
            start_of(term=scene.checkpoints.claim_term("run").number, total_steps=10, steps_of_data=10),
            conductor=scene.conductor,
            stream=LearnerStreamDouble(MemoryServer(wait=Clock().advance), term=1),
            publisher=GivesUp(at),
        )
    saved = scene.checkpoints.newest_complete(ancestry(scene.folder))
    assert saved is not None
    assert (saved.state.step, saved.state.extra["consumed_samples"]) == (num_steps, 4 * num_steps)
    recorded = [step for step, metrics in scene.stream.records if "train_optim/loss" in metrics]
    assert recorded == list(range(1, num_steps + 1))


def test_what_a_standby_waited_before_its_first_step_is_no_part_of_that_step(tmp_path: Path) -> None:
    config = learner_config(make_model(tmp_path / "model", hidden=32), dir=tmp_path)
    scene = Scene(tmp_path, planned(2), Plan(kind=Kind.STOP, step=1))
    tokenizer_info = read_tokenizer_info(config.model.path)
    now = [0.0]
    progress = Progress(part="learner/0", role="learner", timer=lambda: now[0])
    with progress.waiting(Wait.LEASE):
        now[0] = 86400.0
    work(
        surroundings(config, tokenizer_info=tokenizer_info, progress=progress),
        load_policy(config, ALONE, tokenizer_info.end_ids),
        start_of(term=scene.checkpoints.claim_term("run").number, total_steps=10, steps_of_data=10),
        conductor=scene.conductor,
        stream=LearnerStreamDouble(MemoryServer(wait=Clock().advance), term=1),
        publisher=Unpublished(term=1),
    )
    [recorded] = [metrics for _, metrics in scene.stream.records if "train_optim/loss" in metrics]
    assert recorded.get("idle/lease", 0.0) == 0.0
