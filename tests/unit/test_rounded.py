"""What eight bits make of weights and inputs, and of a model's log-probs: the unit for an engine that quantises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from streamrl.config.engine_args import QUANTIZED, Form
from streamrl.workers.engines.model import read_model
from streamrl.workers.proofs.reference import Reference
from streamrl.workers.proofs.rounded import is_rounded, rounded_as_in, rounded_input, rounded_weight
from tests.tiny_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

IDS = tuple(range(3, 27))
HALF_A_STEP = 2**-4  # of a type with three bits behind the point, relative to a value


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_value_moves_by_half_a_step_at_most_and_the_largest_of_a_part_by_none(form: Form) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) + 2.0
    weight[3, 5] = 40.0
    rounded = rounded_weight(weight, form)
    normal = weight.abs() > weight.abs().max() / 2**12  # below that steps are as wide as they are there
    assert ((rounded - weight).abs() <= HALF_A_STEP * weight.abs() + 1e-6)[normal].all()
    assert rounded[3, 5] == pytest.approx(40.0)
    assert torch.equal(rounded_weight(torch.zeros(4, 4), form), torch.zeros(4, 4))


def test_parts_that_have_a_scale_of_their_own_do_not_suffer_from_others() -> None:
    weight = torch.full((256, 256), 1e-6)
    weight[0, 0] = 400.0
    lost = {form: int((rounded_weight(weight, form) == 0).sum()) for form in QUANTIZED}
    assert lost == {"fp8_per_tensor": 256 * 256 - 1, "fp8_per_channel": 255, "fp8_per_block": 128 * 128 - 1}
    lost = {form: int((rounded_input(weight, form) == 0).sum()) for form in QUANTIZED}
    assert lost == {"fp8_per_tensor": 256 * 256 - 1, "fp8_per_channel": 255, "fp8_per_block": 127}


def test_layers_that_hold_their_weight_the_other_way_are_rounded_by_their_outputs() -> None:
    layer = Conv1D(nf=4, nx=8)
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert is_rounded(layer, weight)
    assert torch.equal(rounded_as_in(layer, weight, "fp8_per_channel"), rounded_weight(weight.T, "fp8_per_channel").T)


@pytest.mark.parametrize("form", QUANTIZED)
def test_the_reference_rounds_layers_as_an_engine_that_quantises_and_leaves_the_truth_as_it_is(
    form: Form, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", tied=False, dtype=torch.bfloat16)
    facts, mirror = read_model(str(folder), trust_remote_code=False), folder / "model.safetensors"
    plain = Reference(facts, dtype="bfloat16").judge(mirror, IDS)
    reference = Reference(facts, dtype="bfloat16", form=form)
    for _ in range(2):
        judged = reference.judge(mirror, IDS)
        assert judged.truth.tolist() == plain.truth.tolist()
        assert judged.rounding > 2 * plain.rounding
    assert all(parameter.is_meta for shell in reference._shells.values() for parameter in shell.model.parameters())
    assert not any(
        module._forward_pre_hooks for shell in reference._shells.values() for module in shell.model.modules()
    )
