"""A fork as a run: it learns on from the old run's weights, with other settings, and its books are in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.learner.checkpoints.resume import find_checkpoint, fork
from streamrl.learner.objective.optimizer import learning_rate
from streamrl.ops.audit import audit_folder
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner
from tests.replay_world import last_state, last_tensors, same_bits


def run_to_end(config: schema.Config, url: str) -> None:
    with made_up_worker(config, url), running_learner(config, url) as learner:
        assert learner.wait(240) == 0, output(config)


@pytest.mark.long
@pytest.mark.parametrize("new_data", [False, True])
def test_a_fork_goes_on_with_other_settings(tmp_path: Path, redis_url: str, run_name: str, new_data: bool) -> None:
    old = make_run(tmp_path, name=run_name)
    run_to_end(old, redis_url)
    name = f"{run_name}-fork"
    fork(find_checkpoint(f"{old.folder}@3"), tmp_path / "runs" / name, new_data=new_data)
    sampling = schema.Sampling(num_samples=4, max_tokens=8, temperature=0.7)
    optimizer = schema.Optimizer(lr=1e-3, warmup_steps=2)
    new = make_run(tmp_path, name=name, seed=1234 + new_data, sampling=sampling, optimizer=optimizer)

    run_to_end(new, redis_url)

    assert last_state(new)["step"] == 6
    assert not same_bits(last_tensors(old), last_tensors(new))
    outcomes = last_state(new)["stream"]["ledger"]["outcomes"]
    assert outcomes["trained"] == 12
    assert ("dropped/before_fork" in outcomes) is not new_data
    assert last_state(new)["extra"]["first_step"] == (3 if new_data else 0)
    schedule = [learning_rate(step, optimizer, total_steps=3 if new_data else 6) for step in range(6)]
    rates = [line["train_optim/lr"] for line in lines(new.folder / "metrics.jsonl")]
    assert rates == pytest.approx(schedule[:3] if new_data else schedule[3:])
    assert audit_folder(new.folder, redis_url=redis_url, run=name).clean
