"""Two ranks load a mixture of experts, each its own rows, and export it: bit for bit what transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamrl.learner.loading.build import load_model
from tests.tiny_families import make_family
from tests.unit.test_sources import packed
from tests.warm import run_ranks


@pytest.mark.parametrize(("family", "is_packed"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_two_ranks_hold_and_export_what_transformers_loads(tmp_path: Path, family: str, is_packed: bool) -> None:
    folder = make_family(tmp_path / "model", family)
    if is_packed:
        packed(folder)
    words = (str(folder), str(tmp_path))
    run_ranks("tests.integration.loading_rank", *words, size=2, out=tmp_path / "logs", timeout_s=240)
    expected = {name: p.detach().float() for name, p in load_model(str(folder)).named_parameters()}
    loaded = safetensors.torch.load_file(tmp_path / "loaded.safetensors")
    exported = dict(load_model(str(tmp_path / "run" / "export")).named_parameters())
    assert loaded.keys() == exported.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert all(torch.equal(exported[name], expected[name].bfloat16().float()) for name in expected)
