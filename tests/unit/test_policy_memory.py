"""What a pass leaves in memory: no layer's weights in bf16 beyond the layer, with checkpointing or without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.learner_gpu import SIZES
from bench.long_tailed import make_config
from streamrl.config import schema
from streamrl.learner.loading import load
from streamrl.learner.loading.load import load_policy
from streamrl.learner.packing.pack import pack
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.parallel.fsdp import layers_of
from streamrl.learner.planning import recomputing
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.process.ranks import World
from tests.casts import watch_a_pass
from tests.learner_cases import learner_config
from tests.tiny_models import make_model
from tests.unit.test_packing import piece

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_computed_again_by_a_decision_after_sharding_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder = make_model(tmp_path)
    calls = []

    def gradients(*, again: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(load, "recomputes", lambda *_args, **_options: again)
        policy = load_policy(learner_config(folder, model={"path": str(folder), "dtype": dtype}), ALONE, (1,))
        hook = next(layers_of(policy.model)).self_attn.register_forward_hook(lambda *_: calls.append(again))
        pieces = [piece(i, 3, 4 + i, group=0) for i in range(3)]
        [batch] = pack(pieces, max_tokens=200, shape=policy.shape)
        policy(batch).logp.sum().backward()
        hook.remove()
        return {name: whole(p.grad).clone() for name, p in policy.named_parameters() if p.grad is not None}

    kept, computed_again = gradients(again=False), gradients(again=True)
    assert calls == [False, True, True]
    assert kept.keys() == computed_again.keys()
    assert all(torch.equal(kept[name], computed_again[name]) for name in kept)


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
        ({"dtype": "float32"}, 200e9, True),
        ({"attention": "masked"}, 200e9, True),
        ({"lora": {"rank": 4, "dropout": 0.1}}, 200e9, True),
        ({"lora": {"rank": 4}}, 84e9, False),
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
    settings = {**settings, **({"lora": schema.Lora(**settings["lora"])} if "lora" in settings else {})}
    asked = config.model_copy(update={"model": config.model.model_copy(update=settings)})
    assert recomputing.recomputes(asked, Sizes.of(model), gpu) == again
    assert recomputing.recomputes(asked, Sizes.of(model), ALONE) == (settings.get("gradient_checkpointing") is True)


def test_a_process_that_trains_alone_has_its_gpus_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells the share of a numbered GPU only."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", {1: 0.5}.__getitem__, raising=False)
    assert recomputing.room_on(World.alone().device) == 500
