"""The FLOPs of a step, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from streamrl.config import schema
from streamrl.learner.loading.build import load_model
from streamrl.learner.metrics.gpu import peak_flops
from streamrl.learner.model.lora import inject_adapters
from streamrl.learner.model.policy import Flops
from streamrl.learner.packing.micro_batches import Piece
from tests.tiny_models import make_model


def piece(*, sample: int, prompt: int, response: int, trained: int) -> Piece:
    return Piece(
        sample=sample,
        group=0,
        prompt_ids=np.zeros(prompt, dtype=np.int32),
        token_ids=np.zeros(response, dtype=np.int32),
        behaviour_logprobs=np.zeros(response, dtype=np.float32),
        mask=np.arange(response) < trained,
    )


def test_a_prompt_counts_once_and_the_last_token_predicts_nothing() -> None:
    pieces = [piece(sample=0, prompt=3, response=3, trained=3), piece(sample=1, prompt=3, response=2, trained=1)]
    assert Flops(layers=1, head=0, attended=0).of_pass(pieces) == 3 + 2 + 1
    assert Flops(layers=0, head=1, attended=0).of_pass(pieces) == 4
    # Prompt 1 + 2 + 3, first response 4 + 5, second 4.
    assert Flops(layers=0, head=0, attended=1).of_pass(pieces) == 6 + 9 + 4


def test_a_model_costs_six_times_its_matrices_and_less_when_adapters_train(tmp_path: Path) -> None:
    model = load_model(str(make_model(tmp_path, hidden=32, layers=2, heads=2, kv_heads=1)))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    flops = Flops.of(model)
    assert flops.layers == 6 * 2 * layer
    assert flops.head == 6 * model.get_output_embeddings().weight.numel()
    assert flops.attended == 12 * 2 * 32
    inject_adapters(model, schema.Lora(rank=4, targets=("q_proj",)), torch.device("cpu"))
    adapter = 2 * (32 * 4 + 4 * 32)
    adapted = Flops.of(model)
    assert adapted.layers == 4 * (2 * layer + adapter) + 2 * adapter
    assert adapted.head == 4 * model.get_output_embeddings().weight.numel()


def test_no_share_of_an_unknown_machine_is_claimed() -> None:
    assert peak_flops(torch.device("cpu")) is None
