"""A plain transformers model that takes its weights from a mirror: for generation, and as a reference for engines.

Only the configuration comes from the model's folder. Allocates the whole model.

Also computes the distribution that the transformers engine samples from; each row has its own sampling settings. The
order is vLLM's: mask end tokens before `min_tokens`, repetition penalty, temperature, top-k, top-p. Greedy rows take
the most likely token; their logprobs are at temperature 1, without top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from streamrl.config import schema
from streamrl.config.routers import keep_biases
from streamrl.errors import DataError, WeightsError
from streamrl.workers.engines.model import ModelFacts


def build_model(
    model: ModelFacts, *, dtype: torch.dtype, within: AbstractContextManager[object]
) -> transformers.PreTrainedModel:
    """Build the model inside `within`, which decides where its weights live and how they are initialised."""
    try:
        config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        with within:
            built: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise DataError(f"model {model.path!r} cannot be built: {error}") from error
    if dtype == torch.float64:
        built.set_experts_implementation("eager")  # torch has no grouped matmul in float64
    keep_biases(built)
    built.tie_weights()
    built.eval()
    return built


def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load everything a version publishes: parameters in place; buffers in their published, higher precision."""
    parameters, buffers = dict(model.named_parameters()), list(persistent_buffers(model))
    if missing := {*parameters, *(name for name, _, _ in buffers)} - tensors.keys():
        raise WeightsError(f"the weights lack {len(missing)} parameters, {min(missing)} for one")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
        for name, owner, leaf in buffers:
            owner._buffers[leaf] = tensors[name].to(next(model.parameters()).device, copy=True)


def published(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors a version publishes for this model; a tied head is the embedding, so it has no entry."""
    buffers = {name: owner.get_buffer(leaf) for name, owner, leaf in persistent_buffers(model)}
    return {**dict(model.named_parameters()), **buffers}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, owner, name in the owner) of each persistent floating-point buffer, which checkpoints contain."""
    for place, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield f"{place}.{leaf}" if place else leaf, module, leaf


def token_logprobs(model: nn.Module, token_ids: list[int]) -> list[float]:  # [T-1]
    """Return the logprob of each token but the first, given those before it: plain log-softmax in fp32."""
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        values: list[float] = logits.log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    sampling: schema.Sampling
    num_tokens: int  # generated so far
    seen: Sequence[int]  # prompt and response so far; read only with a repetition penalty


def processed_logprobs(logits: Tensor, rows: Sequence[RowState], stop_ids: Sequence[int]) -> Tensor:  # [B, V] fp32
    """Return the logprobs of the distribution that each row is sampled from."""
    logits = logits.float().clone()
    for i, row in enumerate(rows):
        if row.num_tokens < row.sampling.min_tokens:
            logits[i, list(stop_ids)] = -torch.inf
        processors: Any = _processors(row.sampling)
        if processors:
            seen = torch.tensor([row.seen], device=logits.device)
            logits[i : i + 1] = processors(seen, logits[i : i + 1])
    return torch.log_softmax(logits, dim=-1)


def _processors(sampling: schema.Sampling) -> transformers.LogitsProcessorList:
    chosen: list[transformers.LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        chosen.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.greedy:
        if sampling.temperature != 1:
            chosen.append(transformers.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chosen.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(transformers.TopPLogitsWarper(sampling.top_p))
    return transformers.LogitsProcessorList(chosen)


def choose(logprobs: Tensor, rows: Sequence[RowState], generator: torch.Generator) -> Tensor:  # [B]
    """Return one token per row."""
    sampled = torch.multinomial(logprobs.exp(), num_samples=1, generator=generator)[:, 0]
    greedy = torch.tensor([row.sampling.greedy for row in rows], device=logprobs.device)
    return torch.where(greedy, logprobs.argmax(dim=-1), sampled)
