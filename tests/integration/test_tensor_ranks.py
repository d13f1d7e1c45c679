"""Layers that ranks share (gloo, FSDP2) against one rank that has them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.learner.process.ranks import World
from tests.integration.layout_ranks import assert_parts_make_the_whole, assert_restored, assert_served_alike, save
from tests.integration.tensor_ranks import (
    CASES,
    MERGED,
    RESUMED,
    SERVED,
    Rank,
    learn,
    merge,
    name_of,
    serve,
)
from tests.tiny_families import make_family
from tests.warm import run_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
# Tensor x replicas x context
TRIED = ((2, "2x1x1"), (4, "2x1x1"))
MORE = [(4, "4x1x1"), (4, "2x2x1"), (4, "2x1x2"), (8, "4x1x2"), (8, "4x2x1"), (8, "2x2x2"), (8, "2x1x4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one rank, made here, and of four and two."""
    folder = tmp_path_factory.mktemp("tensor")
    for name, case in CASES.items():
        make_family(folder / name, case.family, **case.settings)
    learn(folder, ALONE)
    rank = Rank(folder, SERVED, ALONE)
    for step, lr in ((1, 1e-3), (2, 1e-5)):  # the second differs in some bits of bf16
        rank.step(1, lr=lr)
        save(rank, folder / f"weights-{step}")
    serve(folder, ALONE)
    merge(folder, ALONE)
    ranks(4, folder, "go_on,merge", "4x1x1")
    ranks(4, folder, "learn,serve", "2x1x1")
    ranks(2, folder, "go_on,learn,serve,merge", "2x1x1")
    return folder


def ranks(size: int, folder: Path, jobs: str, *layouts: str) -> None:
    module = "tests.integration.tensor_ranks"
    run_ranks(module, str(folder), jobs, *layouts, size=size, out=folder / "logs", timeout_s=600 if size == 8 else 240)


def read(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


@pytest.mark.parametrize(("size", "layout"), TRIED)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_layers_learn_what_one_learns(folder: Path, name: str, size: int, layout: str) -> None:
    assert_as_one(folder, name, size, layout)


@pytest.mark.parametrize(("size", "layout"), TRIED)
def test_versions_are_bit_for_bit_those_of_one_rank(folder: Path, size: int, layout: str, tmp_path: Path) -> None:
    assert_served_alike(folder / f"served-{name_of(ALONE)}", folder / f"served-{size}-{layout}", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "layout"), MORE)
def test_more_ranks_learn_and_serve_what_one_does(folder: Path, tmp_path: Path, size: int, layout: str) -> None:
    """Adapters, too, which ranks share that share layers and samples."""
    ranks(size, folder, "learn,serve", layout)
    for name in CASES:
        assert_as_one(folder, name, size, layout)
    assert_served_alike(folder / f"served-{name_of(ALONE)}", folder / f"served-{size}-{layout}", tmp_path)


def assert_as_one(folder: Path, name: str, size: int, layout: str) -> None:
    """Gradients, norms, losses and metrics of several algorithms, and the weights after two steps."""
    one, more = (read(folder / f"{name}-{which}.safetensors") for which in (name_of(ALONE), f"{size}-{layout}"))
    assert any(value.abs().max() > 1e-3 for key, value in one.items() if key.startswith("gspo"))
    if CASES[name].dtype == "float32":  # AdamW makes a whole step of what is rounding alone
        one, more = ({k: v for k, v in found.items() if "weights/" not in k} for found in (one, more))
    most = TOLERANCES[CASES[name].dtype]
    torch.testing.assert_close(more, one, atol=most, rtol=most, msg=lambda said: f"{name}, {layout}: {said}")


@pytest.mark.parametrize("more", ["2-2x1x1", "4-4x1x1"])
def test_adapters_are_published_and_merged_bit_for_bit_as_by_one_rank(folder: Path, more: str) -> None:
    one, together = (read(folder / f"merged-{name}.safetensors") for name in (name_of(ALONE), more))
    assert one.keys() == together.keys()
    assert [name for name in one if not torch.equal(one[name], together[name])] == []
    base = read(folder / MERGED / "model.safetensors")
    adapted = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(one[f"served/{adapted}"], base[adapted].bfloat16())


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_is_restored_bit_for_bit_by_half_as_many_ranks_and_by_one(folder: Path, name: str) -> None:
    assert_restored(folder / name, Rank(folder, name, ALONE))


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_of_four_two_and_one_ranks_ends_within_1e_9_of_the_whole_one(folder: Path, name: str) -> None:
    whole, last = (Rank(folder, name, ALONE) for _ in range(2))
    assert_parts_make_the_whole(folder / name, whole, last)
