"""The learner as a process, against a real Redis: whole runs, interrupted ones, and ones that must fail."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import safetensors.torch
import torch
import transformers

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.terms import CheckpointName, claim_run
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import PretrainedFiles
from streamrl.protocol.weights.stores import open_store
from tests.helpers import wait_until
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner
from tests.made_pages import is_explained

PATIENCE_S = 240
TWO_PASSES = schema.Algorithm(loss="decoupled", reinforce_epochs=2)


@pytest.fixture(scope="module")
def url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """The session's server, emptied again: runs here outlive their tests."""
    yield redis_server.url
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, url: str) -> schema.Config:
    """A run of one process from its first step to its last, validated before, between and after."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = str(folder / "prompts.jsonl")
    config = make_run(
        folder,
        name="whole",
        algorithm=TWO_PASSES,
        data=schema.Data(train=prompts, validation=prompts),
        validation=schema.Validation(every_steps=4, max_prompts=5),
    )
    with made_up_worker(config, url):
        assert run_to_end(config, url) == 0, output(config)
    return config


def test_a_run_makes_its_steps_and_records_known_metrics(whole: schema.Config) -> None:
    records = lines(whole.folder / "metrics.jsonl")
    assert steps(whole) == [1, 2, 3, 4, 5, 6]
    names = {name for record in records for name in record} - {"step", "term", "at"}
    assert [name for name in names if not is_explained(name)] == [], "docs/metrics.md"
    expected = {"train_optim/loss", "policy/ess", "lag/mean", "train_rollouts/init_policy_kl", "timers/publish"}
    expected |= {"idle/groups", "policy/masked_fraction", "policy/ratio_histogram/1.01", "throughput/tflop_per_s"}
    assert expected | {"train_rollouts/rewards/favourite"} <= names


def test_each_pass_over_a_batch_is_an_optimizer_step(whole: schema.Config) -> None:
    [file] = max((whole.folder / "checkpoints").glob("e*")).glob("train-*")
    with safetensors.safe_open(file, framework="pt") as state:
        made = json.loads(state.metadata()["steps"])
    assert set(made.values()) == {6 * 2}


def test_every_ticket_that_a_run_trained_is_in_its_last_checkpoint(whole: schema.Config) -> None:
    ledger = last_checkpoint(whole)["stream"]["ledger"]
    assert ledger["outcomes"]["trained"] == 6 * whole.training.groups_per_step


def test_a_run_ends_finished_with_nobody_holding_its_lease(whole: schema.Config, client: redis.Redis) -> None:
    keys = Keys(whole.name)
    assert client.hget(keys.meta, "state") == b"finished"
    assert not client.exists(keys.lease)


def test_validation_frames_the_run_and_shows_samples(whole: schema.Config) -> None:
    records = lines(whole.folder / "validation.jsonl")
    assert [records[0]["step"], records[-1]["step"]] == [0, 6]
    assert all(record["metrics"]["val_rollouts/num_prompts"] == 5 for record in records)
    assert records[0]["samples"][0]["prompt"].startswith("say ")


def test_the_export_is_what_workers_were_served_and_plain_transformers_loads_it(
    whole: schema.Config, client: redis.Redis, tmp_path: Path
) -> None:
    served, step = served_weights(whole, client, tmp_path)
    assert step == 6
    exported = exported_weights(whole)
    assert all(torch.equal(served[name], exported[name]) for name in exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole.folder / "export", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole.folder / "export")
    assert torch.isfinite(model(**tokenizer("say 1:", return_tensors="pt")).logits).all()


def test_a_checkpoint_of_any_run_is_written_as_a_model(
    whole: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "models" / "mine"
    assert main(["weights", "export", f"{whole.folder}@6", "--to", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    written, exported = safetensors.torch.load_file(made / "model.safetensors"), exported_weights(whole)
    assert written.keys() == exported.keys()
    assert all(torch.equal(written[name], exported[name]) for name in exported)
    assert [path.name for path in made.parent.iterdir()] == ["mine"]
    assert main(["weights", "export", str(whole.folder), "--to", str(made)]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    assert main(["weights", "export", str(made), "--to", str(tmp_path / "again")]) == 2
    assert "is a model already" in capsys.readouterr().err


def test_a_finished_run_answers_from_its_folder(
    whole: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which lies elsewhere now, and whose Redis is gone."""
    folder = tmp_path / "whole"
    shutil.copytree(whole.folder, folder)
    gone = whole.model_copy(update={"redis": schema.Redis(url=f"unix://{tmp_path}/gone.sock")})
    (folder / "config.yaml").write_text(dump_config(gone))
    assert main(["status", str(folder)]) == 0
    assert "whole  finished  step 6" in capsys.readouterr().out
    assert main(["groups", "tail", str(folder), "-n", "9", "--json"]) == 0
    kept = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["step"] for record in kept] == [1, 2, 3, 4, 5, 6]
    assert all(sample["text"] for record in kept for sample in record["samples"])


def test_a_run_interrupted_at_one_two_and_one_ranks_learns_what_the_whole_one_learns(
    whole: schema.Config, url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(tmp_path, name="interrupted", algorithm=TWO_PASSES)
    with made_up_worker(config, url):
        assert run_until_step(config, url, 1) == 0, output(config)
        assert client.hget(Keys(config.name).meta, "state") == b"stopped"
        assert run_until_step(config, url, 3, processes=2) == 0, output(config)
        assert client.hget(Keys(config.name).meta, "state") == b"stopped", output(config)
        assert run_to_end(config, url) == 0, output(config)
    assert steps(config) == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(exported_weights(config), exported_weights(whole), atol=1e-5, rtol=0)
    terms = {line["term"] for line in lines(config.folder / "metrics.jsonl")}
    assert terms == {1, 2, 3}


def test_a_loss_of_ones_own_trains_on_two_ranks_and_tells_of_itself(url: str, tmp_path: Path) -> None:
    algorithm = schema.Algorithm(loss="tests.own_loss:with_bonus", loss_args={"bonus": 0.01})
    config = make_run(tmp_path, name="own", algorithm=algorithm)
    with made_up_worker(config, url):
        assert run_to_end(config, url, processes=2) == 0, output(config)
    records = [record for record in lines(config.folder / "metrics.jsonl") if "train_optim/loss" in record]
    assert len(records) == 6
    assert records[0]["loss/apart"] == 0, "the policy begins as its reference"
    assert records[-1]["loss/apart"] > 0
    assert all(record["loss/tokens"] > 0 for record in records)


def test_steps_that_are_never_finite_end_the_run_with_a_clear_error(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(tmp_path, name="absurd", training=schema.Training(groups_per_step=2, max_skipped_in_row=2))
    with made_up_worker(config, url, scale=1e308):
        assert run_to_end(config, url) == 1
    assert "2 steps in a row had a non-finite loss or gradient" in output(config)
    assert client.hget(Keys(config.name).meta, "state") == b"failed"
    assert steps(config) == []


@pytest.mark.parametrize("key", ["model.lora.targets", "algorithm.loss"])
def test_a_mistake_under_torchrun_is_told_once_and_not_tried_again(url: str, tmp_path: Path, key: str) -> None:
    lora = schema.Lora(targets=("nowhere",)) if key == "model.lora.targets" else None
    model = schema.Model(path=str(tmp_path / "model"), dtype="float32", lora=lora)
    loss = "tests.own_loss:without_values" if key == "algorithm.loss" else "truncated"
    config = make_run(tmp_path, name="mistaken", model=model, algorithm=schema.Algorithm(loss=loss))
    assert run_to_end(config, url, processes=2) == 2
    told = [line for line in output(config).splitlines() if line.startswith(f"learner: {key}")]
    assert len(told) == 1
    assert json.loads((config.folder / "error.json").read_text())["exit_code"] == 2


def test_a_learner_without_an_agent_refuses_checkpoints_where_it_may_not_resume(url: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, name="once", checkpoint=schema.Checkpoint(resume=False))
    CheckpointRoot(config.folder).claim_term(claim_run(config.folder))
    (config.folder / "checkpoints" / str(CheckpointName(1, 5))).mkdir(parents=True)
    assert run_to_end(config, url) == 2
    assert "checkpoint.resume = false" in output(config)


def test_a_run_that_was_removed_is_refused_under_torchrun_once_and_leaves_no_trace(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(tmp_path, name="removed")
    client.set(Keys(config.name).tombstone, claim_run(config.folder))
    assert run_to_end(config, url, processes=1) == 1
    assert "use --takeover to continue it there" in json.loads((config.folder / "error.json").read_text())["error"]
    assert output(config).count("learner: run 'removed' was removed from Redis") == 1
    assert not (config.folder / "terms").exists()


@pytest.mark.long
def test_a_job_whose_time_is_over_stops_and_the_next_one_goes_on_to_the_end(
    url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Its ranks need more than this second to begin, which counts."""
    outcomes = []
    for max_time in ("00:00:00:01", None):
        training = schema.Training(groups_per_step=4, max_steps=6, max_time=max_time)
        config = make_run(tmp_path, name="queued", training=training)
        with made_up_worker(config, url), running_learner(config, url, processes=1) as process:
            assert process.wait(PATIENCE_S) == 0, output(config)
        state = client.hget(Keys(config.name).meta, "state")
        outcomes.append((state, last_checkpoint(config)["step"], (config.folder / "export").exists()))
    assert outcomes == [(b"stopped", 0, False), (b"finished", 6, True)]


@pytest.mark.long
def test_adapters_train_on_two_ranks_and_workers_are_served_what_is_exported(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    model = schema.Model(path=str(tmp_path / "model"), dtype="float32", lora=schema.Lora(rank=3))
    config = make_run(tmp_path, name="adapters", model=model)
    with made_up_worker(config, url):
        assert run_to_end(config, url, processes=2) == 0, output(config)
    assert steps(config) == [1, 2, 3, 4, 5, 6]
    served, _ = served_weights(config, client, tmp_path / "served")
    exported = exported_weights(config)
    assert all(torch.equal(served[name], exported[name]) for name in exported)
    adapters = safetensors.torch.load_file(config.folder / "export" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)


def run_to_end(config: schema.Config, url: str, *, processes: int = 0) -> int:
    with running_learner(config, url, processes=processes) as process:
        return process.wait(PATIENCE_S)


def run_until_step(config: schema.Config, url: str, step: int, *, processes: int = 0) -> int:
    """Then SIGTERM; the exit code."""
    with running_learner(config, url, processes=processes) as process:
        wait_until(
            lambda: process.poll() is not None or steps(config)[-1:] >= [step],
            description=f"step {step}",
            timeout_s=PATIENCE_S,
        )
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)


def steps(config: schema.Config) -> list[int]:
    return [line["step"] for line in lines(config.folder / "metrics.jsonl") if "train_optim/loss" in line]


def exported_weights(config: schema.Config) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(config.folder / "export" / "model.safetensors")


def served_weights(config: schema.Config, client: redis.Redis, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """(what a worker that comes now would serve, its step)"""
    keys = Keys(config.name)
    kept = {int(version): decode_manifest(data) for version, data in client.hgetall(keys.manifests).items()}
    files = [Path(config.model.path) / "model.safetensors"]
    mirror = Mirror(folder, pretrained=PretrainedFiles(files, name=config.model.path))
    mirror.apply_path(catch_up(0, kept[max(kept)], kept.get), open_store("redis:", client, keys))
    return safetensors.torch.load_file(mirror.path), kept[max(kept)].step


def last_checkpoint(config: schema.Config) -> Mapping[str, Any]:
    newest = max((config.folder / "checkpoints").glob("e*"))
    state: Mapping[str, Any] = json.loads((newest / "manifest.json").read_text())["content"]["state"]
    return state
