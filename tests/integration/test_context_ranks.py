"""Ranks that share samples by their length (gloo, FSDP2), against one rank that has them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.learner.process.ranks import World
from tests.integration.context_ranks import CASES, Rank, learnt, make_models, out_name
from tests.warm import run_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, each with what one rank learns."""
    folder = tmp_path_factory.mktemp("context")
    make_models(folder)
    for name, case in CASES.items():
        safetensors.torch.save_file(learnt(Rank(folder / name, ALONE, case)), folder / name / out_name(1, 1, 1))
    return folder


def assert_as_one(folder: Path, size: int, *, replicas: int = 1, context: int) -> None:
    words = (str(folder), str(replicas), str(context), *CASES)
    run_ranks("tests.integration.context_ranks", *words, size=size, out=folder / "logs", timeout_s=300)
    for name, case in CASES.items():
        one = safetensors.torch.load_file(folder / name / out_name(1, 1, 1))
        more = safetensors.torch.load_file(folder / name / out_name(size, replicas, context))
        assert any(value.abs().max() > 1e-3 for key, value in one.items() if key.startswith("gspo"))
        if case.dtype == "float32":  # AdamW makes a whole step of what is rounding alone
            one, more = ({k: v for k, v in found.items() if "weights/" not in k} for found in (one, more))
        most = TOLERANCES[case.dtype]
        torch.testing.assert_close(more, one, atol=most, rtol=most, msg=lambda said, name=name: f"{name}: {said}")


def test_two_ranks_that_share_samples_learn_what_one_learns(folder: Path) -> None:
    assert_as_one(folder, 2, context=2)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "context"), [(1, 4), (1, 2), (2, 2)])
def test_four_ranks_learn_what_one_learns_in_any_layout(folder: Path, replicas: int, context: int) -> None:
    assert_as_one(folder, 4, replicas=replicas, context=context)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "context"), [(1, 4), (2, 2)])
def test_eight_ranks_learn_what_one_learns(folder: Path, replicas: int, context: int) -> None:
    assert_as_one(folder, 8, replicas=replicas, context=context)
