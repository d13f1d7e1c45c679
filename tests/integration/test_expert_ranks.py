"""Mixtures whose experts are divided over ranks, and whose attention ranks share (gloo, FSDP2), against one rank that
has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from streamrl.learner.process.ranks import World
from tests.integration.expert_ranks import (
    RESUMED,
    Rank,
    cases_of,
    learn,
    name_of,
    replay,
    serve,
)
from tests.integration.layout_ranks import assert_parts_make_the_whole, assert_restored, assert_served_alike, save
from tests.mixtures import MIXTURES, make_mixture
from tests.warm import run_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}  # of which four ranks may have one each
# Experts x replicas x context x tensor
LAYOUTS = {
    2: ("2x1x1x1", "1x1x1x2"),
    4: ("4x1x1x1", "2x1x1x1", "2x2x1x1", "4x1x2x1", "4x1x1x2", "2x1x1x4"),
    8: ("8x1x1x1", "4x1x1x1", "4x2x1x1", "2x2x1x1", "4x2x2x1", "8x1x1x2", "4x1x2x2"),
}
TRIED = [(size, layout) for size in (2, 4) for layout in LAYOUTS[size]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one rank, made here, and of four and two."""
    folder = tmp_path_factory.mktemp("experts")
    for family in MIXTURES:
        make_mixture(folder / family, family, **HEADS)
    learn(folder, ALONE)
    replay(folder, ALONE)
    leave_weights(folder)
    serve(folder, ALONE)
    ranks(4, folder, "go_on", "4x1x1x1")
    for size in (4, 2):
        ranks(size, folder, "learn,replay,serve", *LAYOUTS[size])
    ranks(2, folder, "go_on", "2x1x1x2")
    return folder


def leave_weights(folder: Path) -> None:
    """For two versions: the second differs in some bits of bf16."""
    rank = Rank(folder, RESUMED, ALONE, "float32")
    for step, lr in ((1, 1e-3), (2, 1e-5)):
        rank.step(0, lr=lr)
        save(rank, folder / f"weights-{step}")


def ranks(size: int, folder: Path, jobs: str, *layouts: str) -> None:
    module = "tests.integration.expert_ranks"
    run_ranks(module, str(folder), jobs, *layouts, size=size, out=folder / "logs", timeout_s=600 if size == 8 else 240)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    with safetensors.safe_open(path, framework="pt") as file:
        told = {name: float(value) for name, value in (file.metadata() or {}).items()}
    return safetensors.torch.load_file(path), told


@pytest.mark.parametrize(
    ("size", "layout", "family", "dtype"),
    [(size, layout, *case) for size, layout in TRIED for case in cases_of(f"{size}-{layout}")],
)
def test_divided_experts_learn_what_one_rank_learns(
    folder: Path, size: int, layout: str, family: str, dtype: str
) -> None:
    check_learnt(folder, family, dtype, size, layout)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_experts_divided_over_eight_ranks_do_so_too(folder: Path, tmp_path: Path) -> None:
    ranks(8, folder, "learn,replay,serve", *LAYOUTS[8])
    for at, layout in enumerate(LAYOUTS[8]):
        for family, dtype in cases_of(f"8-{layout}"):
            check_learnt(folder, family, dtype, 8, layout)
        check_told(folder, 8, layout)
        assert_served_alike(folder / f"served-{name_of(ALONE)}", folder / f"served-8-{layout}", tmp_path / str(at))


def check_learnt(folder: Path, family: str, dtype: str, size: int, layout: str) -> None:
    one, alone = read(folder / f"{family}-{dtype}-{name_of(ALONE)}.safetensors")
    more, together = read(folder / f"{family}-{dtype}-{size}-{layout}.safetensors")
    assert {tensor.dtype for tensor in more.values()} == {getattr(torch, dtype)}
    torch.testing.assert_close(more, one, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert {name for name in alone if name.startswith("router/")} >= {"router/load_max_over_mean", "router/entropy"}
    assert together == pytest.approx(alone, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize(("size", "layout"), TRIED)
def test_routes_that_are_told_are_those_of_one_rank(folder: Path, size: int, layout: str) -> None:
    check_told(folder, size, layout)


def check_told(folder: Path, size: int, layout: str) -> None:
    one, alone = read(folder / f"told-{name_of(ALONE)}.safetensors")
    more, together = read(folder / f"told-{size}-{layout}.safetensors")
    torch.testing.assert_close(more, one, atol=1e-9, rtol=1e-9)
    for name in ("router/routes_differ", "router/routes_missing"):  # a prompt counts as often as it is computed
        assert together.pop(name) == pytest.approx(alone[name], abs=0.02)
    assert alone.pop("router/routes_differ") > 0.2
    assert alone.pop("router/routes_missing") < 0.2
    assert together == pytest.approx(alone, abs=1e-4, rel=1e-3)
    by_itself, _ = read(folder / f"{RESUMED}-float64-{name_of(ALONE)}.safetensors")
    assert any(not torch.allclose(one[name], by_itself[name], atol=1e-3) for name in one)


def test_every_expert_learns_something(folder: Path) -> None:
    for family in MIXTURES:
        found, _ = read(folder / f"{family}-float64-{name_of(ALONE)}.safetensors")
        experts = {name: tensor for name, tensor in found.items() if "gradient" in name and ".experts." in name}
        assert experts
        assert all(tensor.flatten(1).any(1).float().mean() > 0.5 for tensor in experts.values())


def test_a_checkpoint_is_restored_bit_for_bit_by_half_as_many_ranks_and_by_one(folder: Path) -> None:
    assert_restored(folder, Rank(folder, RESUMED, ALONE, "float64"))


def test_a_run_of_four_two_and_one_ranks_ends_within_1e_9_of_the_whole_one(folder: Path) -> None:
    whole, last = (Rank(folder, RESUMED, ALONE, "float64") for _ in range(2))
    assert_parts_make_the_whole(folder, whole, last)


@pytest.mark.parametrize(("size", "layout"), TRIED)
def test_versions_are_bit_for_bit_those_of_one_rank(folder: Path, size: int, layout: str, tmp_path: Path) -> None:
    assert_served_alike(folder / f"served-{name_of(ALONE)}", folder / f"served-{size}-{layout}", tmp_path)
