"""What a pass leaves in memory: no layer's weights in bf16 beyond the layer, with checkpointing or without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.learner.loading.load import load_policy, recomputes
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.process.ranks import World
from tests.casts import watch_a_pass
from tests.learner_cases import learner_config
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
LAYERS = 4


@pytest.mark.parametrize("masters", ["device", "cpu"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_casts_of_weights_end_with_their_layer(tmp_path: Path, checkpointing: bool, masters: str) -> None:
    """Else each rank would end with the whole model in bf16: 62 GB of a model of 32B. Two ranks are tested where there
    are some (`tests/integration/test_learner_ranks.py`)."""
    folder = make_model(tmp_path / "model", layers=LAYERS)
    model = {"path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": checkpointing, "masters": masters}
    policy = load_policy(learner_config(folder, model=model), ALONE, (1,))
    matrices = sum(p.ndim == 2 for p in decoder_of(policy.model).layers[0].parameters())

    after, most = watch_a_pass(policy)

    assert after == [0] * (LAYERS + 1)
    assert 0 < most[0] <= most[-1] <= 2 * matrices + matrices  # a layer, the next one, and its gradients


def test_masters_are_wide_what_is_frozen_is_half_and_ranks_add_up_in_fp32(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    lora = {"rank": 2, "targets": ["q_proj"]}
    model = {"path": str(folder), "dtype": "bfloat16", "lora": lora}
    policy = load_policy(learner_config(folder, model=model), ALONE, (1,))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    watch_a_pass(policy)
    whole = load_policy(learner_config(folder, model={"path": str(folder), "dtype": "bfloat16"}), ALONE, (1,))
    assert {p.dtype for p in whole.parameters()} == {torch.float32}


def test_layers_are_computed_again_on_gpus_unless_it_is_said_otherwise() -> None:
    settings = learner_config(Path("m")).model
    assert recomputes(settings, torch.device("cuda", 0))
    assert not recomputes(settings, torch.device("cpu"))
    assert not recomputes(settings.model_copy(update={"gradient_checkpointing": False}), torch.device("cuda", 0))
