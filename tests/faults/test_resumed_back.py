"""T21: a learner dies twenty steps after its checkpoint; who resumes there gives no version's number a second time."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.crashpoints import VARIABLE
from streamrl.ops.audit import audit_folder
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.published import read_manifests
from streamrl.versions import term_of
from tests.faults.agents import last_step, wasted_steps
from tests.faults.harness import FaultWorld
from tests.faults.place import GROUPS_PER_STEP, Place
from tests.faults.report import report
from tests.faults.stand_in_learner import STEP, versions_in
from tests.integration.learner_world import made_up_worker, make_run, output, running_learner

_CHECKPOINT_EVERY = 25
_BACK = 20  # steps
_LIVES = 3
_PATIENCE_S = 240


@pytest.fixture
def place(place: Place) -> Place:
    num_steps = _LIVES * _CHECKPOINT_EVERY
    return replace(place, num_prompts=2 * num_steps * GROUPS_PER_STEP, pace_s=0.005, commit_every=_CHECKPOINT_EVERY)


def dies_at(step: int, *, since: int) -> str:
    """Just after it has announced that step's version; it publishes once before its first step."""
    return f"announce.written:{step - since + 1}"


def test_learners_that_resume_twenty_steps_back_again_and_again_give_no_number_twice(world: FaultWorld) -> None:
    world.start_worker()
    versions: list[list[int]] = []
    steps: list[str] = []
    for life in range(_LIVES):
        since = world.newest_checkpoint().step
        dies = dies_at(since + _CHECKPOINT_EVERY + _BACK, since=since)
        learner = world.start_learner(crash_at=dies if life < _LIVES - 1 else "")
        learner.ends_with(-signal.SIGKILL if life < _LIVES - 1 else 0)
        versions.append(versions_in(learner.output))
        steps += [line for line in learner.output.splitlines() if line.startswith(STEP)]
    num_given = sum(map(len, versions))
    reused = num_given - len(set().union(*versions))
    wasted = len(steps) - len(set(steps))
    report("T21", world.audit(), injections=_LIVES - 1, wasted_steps=wasted, versions=num_given, reused=reused)
    assert reused == 0
    assert wasted == (_LIVES - 1) * _BACK
    assert all(max(earlier) < min(later) for earlier, later in pairwise(versions))


@pytest.mark.long
def test_the_versions_of_a_real_learner_that_resumes_twenty_steps_back_are_all_new(
    tmp_path: Path, run_name: str, redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(
        tmp_path,
        name=run_name,
        training=schema.Training(groups_per_step=2, max_steps=_CHECKPOINT_EVERY + _BACK + 5),
        checkpoint=schema.Checkpoint(every_steps=_CHECKPOINT_EVERY),
        weights=schema.Weights(dtype="float32", anchor_every=1000, anchor_share=1000.0),  # so all versions are kept
    )
    keys = Keys(run_name)
    with made_up_worker(config, redis_url):
        monkeypatch.setenv(VARIABLE, dies_at(_CHECKPOINT_EVERY + _BACK, since=0))
        with running_learner(config, redis_url) as learner:
            assert learner.wait(_PATIENCE_S) == -signal.SIGKILL, output(config)
        before = read_manifests(client, keys).by_version
        monkeypatch.delenv(VARIABLE)
        with running_learner(config, redis_url) as learner:
            assert learner.wait(_PATIENCE_S) == 0, output(config)
    after = {v: m for v, m in read_manifests(client, keys).by_version.items() if m != before.get(v)}

    reused = len(before.keys() & after.keys())
    audit = audit_folder(config.folder, redis_url=redis_url)
    counts = {"versions": len(before) + len(after), "reused": reused}
    report("T21 real", audit, injections=1, wasted_steps=wasted_steps(config), **counts)
    assert reused == 0
    steps_before, steps_after = ([manifest.step for manifest in each.values()] for each in (before, after))
    assert all(a < b for steps in (steps_before, steps_after) for a, b in pairwise(steps))
    # One that is still on its way when a step ends is passed over, so not each step has a version.
    assert steps_before[0] == 0
    assert steps_before[-1] > _CHECKPOINT_EVERY
    assert (steps_after[0], steps_after[-1]) == (_CHECKPOINT_EVERY, last_step(config))
    assert max(before) < min(after)
    assert {term_of(version) for version in after} == {2}
