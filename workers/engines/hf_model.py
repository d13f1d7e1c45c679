"""A plain transformers model whose weights come from a mirror: to generate with, and to hold engines against.

The model's folder gives the configuration alone. Blocks on memory: as much as the model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamrl.errors import DataError, WeightsError
from workers.engines.model import ModelFacts


def build_model(
    model: ModelFacts, *, dtype: torch.dtype, trust_remote_code: bool, within: AbstractContextManager[object]
) -> PreTrainedModel:
    """Made inside of `within`, which says where its weights are and what is in them."""
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=trust_remote_code)
        with within:
            built: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise DataError(f"model {model.path!r} cannot be built: {error}") from error
    built.tie_weights()
    built.eval()
    return built


def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """All parameters, in place; a tied head is the embedding itself and comes with it."""
    parameters = dict(model.named_parameters())
    if missing := parameters.keys() - tensors.keys():
        raise WeightsError(f"the weights lack {len(missing)} parameters, {min(missing)} for one")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def token_logprobs(model: nn.Module, token_ids: list[int]) -> list[float]:  # [T-1]
    """Of each token but the first, given those before it: plain log-softmax, in fp32."""
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        values: list[float] = logits.log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return values
