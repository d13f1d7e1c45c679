"""Two ranks (gloo, FSDP2) against one: the same mathematics, the same weights, the same versions."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from streamrl.learner.checkpoints.shard import load_state
from streamrl.learner.loading.build import load_model
from streamrl.learner.process.ranks import World
from streamrl.protocol.weights.file_store import FileStore
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import PretrainedFiles
from tests.integration.learner_ranks import (
    ADAPTERS,
    ALGORITHMS,
    JOBS,
    NUM_DOUBLE_STEPS,
    NUM_STEPS,
    Rank,
    make_double_steps,
    out_name,
)
from tests.tiny_models import make_model
from tests.warm import run_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one rank in out-1, made here, and of two in out-2."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model", hidden=32, tied=False)
    for job in JOBS.values():
        job(folder, ALONE)
    ranks(2, folder, *JOBS)
    return folder


def ranks(size: int, folder: Path, *jobs: str, replicas: int = 1) -> None:
    module = "tests.integration.learner_ranks"
    run_ranks(module, str(folder), str(replicas), *jobs, size=size, out=folder / "logs", timeout_s=240)


def check_gradients(folder: Path, size: int, replicas: int = 1) -> None:
    names = out_name(1), out_name(size, replicas)
    one, more = (safetensors.torch.load_file(folder / name / "gradients.safetensors") for name in names)
    assert {name.partition("/")[0] for name in one} == set(ALGORITHMS)
    assert all(torch.isfinite(gradient).all() for gradient in one.values())
    torch.testing.assert_close(more, one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_sharded_ranks_begin_with_the_bits_that_transformers_loads(folder: Path, size: int) -> None:
    begun = safetensors.torch.load_file(folder / f"out-{size}" / "begin.safetensors")
    whole = dict(load_model(str(folder / "model")).named_parameters())
    assert begun.keys() == whole.keys()
    assert all(torch.equal(begun[name], whole[name]) for name in whole)


@pytest.mark.parametrize("size", [1, 2])
def test_no_layers_weights_in_bf16_outlive_its_pass(folder: Path, size: int) -> None:
    for rank in range(size):
        after, most = json.loads((folder / f"out-{size}" / f"half-{rank}.json").read_text())
        assert set(after) == {0}
        assert most[0] > 0


def test_two_ranks_in_bf16_have_the_gradient_of_one_but_for_its_rounding(folder: Path) -> None:
    one, two = (safetensors.torch.load_file(folder / f"out-{size}" / "half.safetensors") for size in (1, 2))
    assert {gradient.dtype for gradient in two.values()} == {torch.float32}
    off = sum(float((two[name] - one[name]).norm() ** 2) for name in one) ** 0.5
    assert off < 0.02 * sum(float(gradient.norm() ** 2) for gradient in one.values()) ** 0.5  # a bf16 is off by 0.004


def weights(folder: Path, size: int, replicas: int = 1) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / out_name(size, replicas) / "weights.safetensors")


def manifests(out: Path) -> list[Manifest]:
    paths = sorted(out.glob("manifest-*"), key=lambda path: int(path.name.split("-")[1]))
    return [decode_manifest(path.read_bytes()) for path in paths]


def test_two_ranks_learn_what_one_learns(folder: Path) -> None:
    torch.testing.assert_close(weights(folder, 2), weights(folder, 1), atol=1e-5, rtol=0)


def test_two_ranks_have_the_gradients_of_one_with_every_algorithm(folder: Path) -> None:
    check_gradients(folder, 2)


def test_two_replicas_have_the_gradients_of_one_and_publish_and_go_on_as_one(folder: Path, tmp_path: Path) -> None:
    check_replicas(folder, 2, tmp_path)


@pytest.mark.long
def test_two_replicas_of_two_ranks_each_do_so_too(folder: Path, tmp_path: Path) -> None:
    check_replicas(folder, 4, tmp_path)


def check_replicas(folder: Path, size: int, tmp_path: Path) -> None:
    ranks(size, folder, "gradients", "work", replicas=2)
    check_gradients(folder, size, 2)
    torch.testing.assert_close(weights(folder, size, 2), weights(folder, 1), atol=1e-5, rtol=0)
    check_poisoned(folder, size, tmp_path / "poisoned", 2)
    check_published(folder, size, tmp_path / "published", 2)
    files = (folder / out_name(size, 2) / "checkpoint").iterdir()
    sizes = [path.stat().st_size for path in sorted(files)]
    assert max(sizes[size // 2 :]) < 0.2 * min(sizes[: size // 2]), "what all replicas hold is written once"


@pytest.mark.long
def test_four_ranks_have_the_gradients_of_one_with_every_algorithm(folder: Path) -> None:
    ranks(4, folder, "gradients")
    check_gradients(folder, 4)


def test_metrics_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    with (
        safetensors.safe_open(folder / "out-1" / "weights.safetensors", framework="pt") as one,
        safetensors.safe_open(folder / "out-2" / "weights.safetensors", framework="pt") as two,
    ):
        alone, together = one.metadata(), two.metadata()
    assert set(alone) == set(together)
    for name, value in alone.items():
        assert float(together[name]) == pytest.approx(float(value), abs=1e-4, rel=1e-3), name


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_that_is_not_a_number_on_one_rank_makes_all_skip_and_is_never_published(
    folder: Path, size: int, tmp_path: Path
) -> None:
    check_poisoned(folder, size, tmp_path)


def check_poisoned(folder: Path, size: int, tmp_path: Path, replicas: int = 1) -> None:
    out = folder / out_name(size, replicas)
    for rank in range(size):
        found = json.loads((out / f"poisoned-{rank}.json").read_text())
        assert all(found.values()), (rank, found)
    [path] = (out / "poisoned").glob("manifest-*")
    mirror = Mirror(tmp_path)
    mirror.apply(decode_manifest(path.read_bytes()), FileStore(out / "poisoned" / "blobs"))
    assert all(torch.isfinite(tensor).all() for tensor in safetensors.torch.load_file(mirror.path).values())


@pytest.mark.parametrize("size", [1, 2])
def test_published_versions_are_the_weights_bit_for_bit(folder: Path, size: int, tmp_path: Path) -> None:
    check_published(folder, size, tmp_path)


@pytest.mark.long
def test_four_ranks_publish_bit_for_bit_too(folder: Path, tmp_path: Path) -> None:
    ranks(4, folder, "work")
    check_published(folder, 4, tmp_path)


def check_published(folder: Path, size: int, tmp_path: Path, replicas: int = 1) -> None:
    """Although each version got out beside the step after it, which wrote to the parameters."""
    out = folder / out_name(size, replicas)
    versions = manifests(out)
    assert [manifest.step for manifest in versions] == list(range(NUM_STEPS + 1))
    for manifest, before in zip(versions[1:], versions, strict=False):
        assert manifest.base in (before.version, 0)  # where everything changed, a delta is no smaller than an anchor
    assert all(len(manifest.shards) == size for manifest in versions)
    mirror = Mirror(tmp_path)
    for manifest in versions:
        mirror.apply(manifest, FileStore(out / "blobs"))
    served = safetensors.torch.load_file(mirror.path)
    rank = Rank(folder, ALONE)
    load_state(out / "checkpoint", rank.policy, rank.optimizer, ALONE)
    trained = rank.weights()
    assert served.keys() == trained.keys()
    assert all(torch.equal(served[name], trained[name]) for name in trained)


def test_a_checkpoint_of_two_ranks_goes_on_alone(folder: Path) -> None:
    rank = Rank(folder, ALONE)
    load_state(folder / "out-2" / "checkpoint", rank.policy, rank.optimizer, ALONE)
    rank.step(NUM_STEPS)
    torch.testing.assert_close(rank.weights(), weights(folder, 2), atol=1e-5, rtol=0)


def test_a_checkpoint_of_one_rank_goes_on_with_two(folder: Path) -> None:
    grown = safetensors.torch.load_file(folder / "out-2" / "grown.safetensors")
    torch.testing.assert_close(grown, weights(folder, 1), atol=1e-5, rtol=0)


def test_in_float64_a_run_of_one_two_and_one_ranks_ends_within_1e_9_of_the_whole_one(folder: Path) -> None:
    rank = Rank(folder, ALONE, dtype="float64")
    load_state(folder / "double-2", rank.policy, rank.optimizer, ALONE)
    make_double_steps(rank, 2 * NUM_DOUBLE_STEPS // 3, NUM_DOUBLE_STEPS)
    whole, ours = safetensors.torch.load_file(folder / "double.safetensors"), rank.weights()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float64}
    torch.testing.assert_close(ours, whole, atol=1e-9, rtol=0)


def adapted(folder: Path, size: int, what: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"out-{size}" / "adapters" / f"{what}.safetensors")


def test_adapters_begin_alike_on_any_number_of_ranks(folder: Path) -> None:
    one, two = (adapted(folder, size, "begin") for size in (1, 2))
    assert all(torch.equal(two[name], one[name]) for name in one)


def test_two_ranks_train_the_adapters_that_one_trains(folder: Path) -> None:
    one, two = (adapted(folder, size, "merged") for size in (1, 2))
    torch.testing.assert_close(two, one, atol=1e-5, rtol=0)
    base = load_model(str(folder / "model")).state_dict()
    moved = {name for name in one if not torch.allclose(one[name], base[name], atol=1e-3)}
    assert {name.split(".")[-2] for name in moved} == set(ADAPTERS.targets)


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_go_on_from_a_checkpoint_as_if_nothing_had_been(folder: Path, size: int) -> None:
    resumed, after = adapted(folder, size, "resumed"), adapted(folder, size, "after")
    assert all(torch.equal(resumed[name], after[name]) for name in after)


def test_adapters_of_one_rank_go_on_with_two(folder: Path) -> None:
    torch.testing.assert_close(adapted(folder, 2, "changed"), adapted(folder, 1, "after"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_workers_are_served_base_and_adapters_merged_as_they_are_exported(
    folder: Path, size: int, tmp_path: Path
) -> None:
    out = folder / f"out-{size}"
    pretrained = PretrainedFiles([folder / "model" / "model.safetensors"], name="tiny")
    mirror = Mirror(tmp_path, pretrained=pretrained)
    paths = sorted((out / "adapters").glob("manifest-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in paths:
        mirror.apply(decode_manifest(path.read_bytes()), FileStore(out / "adapters" / "blobs"))
    merged, served = adapted(folder, size, "merged"), safetensors.torch.load_file(mirror.path)
    exported = safetensors.torch.load_file(out / "run" / "export" / "model.safetensors")
    assert served.keys() == merged.keys() == exported.keys()
    assert all(torch.equal(served[name], merged[name]) for name in merged)
    assert all(torch.equal(exported[name], merged[name]) for name in merged)


@pytest.mark.parametrize("size", [1, 2])
def test_exported_adapters_on_the_base_are_the_merged_model(folder: Path, size: int) -> None:
    out = folder / f"out-{size}"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, out / "run" / "export" / "adapter").merge_and_unload()
    torch.testing.assert_close(dict(model.named_parameters()), adapted(folder, size, "merged"), atol=1e-6, rtol=0)
