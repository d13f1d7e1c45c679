"""What a pass leaves in memory: no layer's weights in bf16 beyond the layer, with checkpointing or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.learner_gpu import SIZES
from bench.long_tailed import make_config
from streamrl.learner.loading.load import load_policy
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.planning import recomputing
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


@pytest.mark.parametrize(
    ("settings", "room", "again"),
    [
        ({}, 84e9, False),
        ({}, 83e9, True),
        ({"compile": True}, 70e9, False),  # which keeps less
        ({"compile": True}, 68e9, True),
        ({"gradient_checkpointing": False}, 1e9, False),
        ({"gradient_checkpointing": True}, 80e9, True),
        ({"activations": "cpu"}, 80e9, True),
        ({"dtype": "float32"}, 80e9, True),
    ],
)
def test_a_gpu_computes_layers_again_if_it_has_no_room_for_all_that_they_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], room: float, again: bool
) -> None:
    """A 1.5B model whose peak on GPUs was measured: 79.5 GB with all activations, 62.3 GB if compiled."""
    monkeypatch.setattr(recomputing, "room_on", lambda _device: int(room / 0.9))
    gpu = World(rank=0, size=1, device=torch.device("cuda", 0))
    model = SIZES["1.5B"].model(max_length=8576, device=torch.device("meta"))
    config = make_config(micro_batch_tokens=16_384, dtype="bfloat16")
    asked = config.model_copy(update={"model": config.model.model_copy(update=settings)})
    assert recomputing.recomputes(asked, model, gpu) == again
    assert recomputing.recomputes(asked, model, ALONE) == (settings.get("gradient_checkpointing") is True)
