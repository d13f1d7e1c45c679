"""A live learner with a curriculum, killed at ten places: it asks the same prompts and comes to the same weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors.torch

from streamrl.config import schema
from tests.feed_world import rows_drawn
from tests.helpers import wait_until
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner
from tests.replay_world import last_tensors

PATIENCE_S = 180
NUM_STEPS = 14
NUM_PROMPTS = 40


def make(folder: Path, name: str) -> schema.Config:
    """No lag and one worker, whose answers follow from the ticket's number: what is trained follows from what is asked.
    Some rewards are equal, so that some prompts rest."""
    return make_run(
        folder,
        name=name,
        num_prompts=NUM_PROMPTS,
        model=schema.Model(path=str(folder / "model"), dtype="float64"),
        data=schema.Data(train=str(folder / "prompts.jsonl"), curriculum=True),
        sampling=schema.Sampling(num_samples=3, max_tokens=4),
        training=schema.Training(groups_per_step=4, max_steps=NUM_STEPS, max_epochs=20),
        lag=schema.Lag(max_steps=0),
        checkpoint=schema.Checkpoint(every_steps=3),
    )


def newest_step(config: schema.Config) -> int:
    return max((line["step"] for line in lines(config.folder / "metrics.jsonl")), default=0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_killed_at_ten_places_asks_the_same_prompts_and_has_the_same_weights(
    tmp_path: Path, redis_url: str, run_name: str
) -> None:
    whole, killed = make(tmp_path, run_name), make(tmp_path, f"{run_name}-killed")
    with made_up_worker(whole, redis_url), running_learner(whole, redis_url) as learner:
        assert learner.wait(PATIENCE_S) == 0, output(whole)
    chance = random.Random(7)
    with made_up_worker(killed, redis_url):
        for step in sorted(chance.sample(range(1, NUM_STEPS - 1), 10)):
            with running_learner(killed, redis_url) as learner:
                wait_until(
                    lambda learner=learner, step=step: learner.poll() is not None or newest_step(killed) >= step,
                    description=f"step {step} is made",
                    timeout_s=PATIENCE_S,
                )
                learner.kill()
        with running_learner(killed, redis_url) as learner:
            assert learner.wait(PATIENCE_S) == 0, output(killed)

    asked, asked_again = rows_drawn(whole.folder), rows_drawn(killed.folder)
    common = asked.keys() & asked_again.keys()
    assert len(common) > 4 * NUM_STEPS
    assert {place: asked[place] for place in common} == {place: asked_again[place] for place in common}
    metrics = lines(whole.folder / "metrics.jsonl")[-1]
    assert metrics["curriculum/passes"] * NUM_PROMPTS > 1.1 * max(asked), "prompts rest"
    ours, theirs = last_tensors(whole), last_tensors(killed)
    assert ours.keys() == theirs.keys()
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours if name.startswith("master/"))
    assert largest <= 1e-9, largest
    exported = [safetensors.torch.load_file(run.folder / "export" / "model.safetensors") for run in (whole, killed)]
    assert exported[0].keys() == exported[1].keys()
