"""T18: a loss that is not a number on one rank of two; both skip the step, and no version shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.ops.audit import audit_folder
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import open_store
from tests.faults.report import report
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner

_PATIENCE_S = 150
_ABSURD = 5  # of the second step, which one rank alone takes


@pytest.mark.long
def test_a_loss_that_is_not_a_number_on_one_rank_makes_both_skip_and_is_never_published(
    tmp_path: Path, run_name: str, redis_url: str, client: redis.Redis
) -> None:
    config = make_run(
        tmp_path,
        name=run_name,
        training=schema.Training(groups_per_step=4, max_steps=4, max_skipped_in_row=3),
        weights=schema.Weights(anchor_share=1.0),  # a second anchor would be the end of the versions before it
    )
    with (
        made_up_worker(config, redis_url, absurd={_ABSURD}),
        running_learner(config, redis_url, processes=2) as learner,
    ):
        assert learner.wait(_PATIENCE_S) == 0, output(config)

    trained = [line for line in lines(config.folder / "metrics.jsonl") if "train_optim/loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    skipped = trained[-1]["train_optim/skipped_steps"]
    audit = audit_folder(config.folder, redis_url=redis_url)
    bad_versions = sum(not finite for finite in published_are_finite(client, config, tmp_path / "mirror"))
    assert (skipped, bad_versions) == (1, 0)
    report("T18", audit, injections=1, skipped_steps=skipped, nan_versions=bad_versions)


def published_are_finite(client: redis.Redis, config: schema.Config, folder: Path) -> list[bool]:
    """Of every version that is still kept, the first of which is a whole one."""
    keys = Keys(config.name)
    manifests = {int(version): decode_manifest(data) for version, data in client.hgetall(keys.manifests).items()}
    mirror, found = Mirror(folder), []
    for version in sorted(manifests):
        mirror.apply(manifests[version], open_store("redis:", client, keys))
        weights = safetensors.torch.load_file(mirror.path)
        found.append(all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()))
    assert len(found) == config.training.max_steps + 1
    return found
