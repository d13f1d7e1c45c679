"""A plain transformers model whose weights come from a mirror: to generate with, and to hold engines against.

The model's folder gives the configuration alone. Blocks on memory: as much as the model has.

The distribution that the transformers engine samples from, for rows that each have settings of their own.

The order is vLLM's: end tokens before `min_tokens` masked, repetition penalty, temperature, top-k, top-p. Greedy rows
take the likeliest token; their log-probs are those at temperature 1, with neither top-k nor top-p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamrl.config import schema
from streamrl.errors import DataError, WeightsError
from streamrl.workers.engines.model import ModelFacts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    sampling: schema.Sampling
    num_tokens: int  # of the response so far
    seen: Sequence[int]  # prompt and response so far; read where there is a repetition penalty


def processed_logprobs(logits: Tensor, rows: Sequence[RowState], stop_ids: Sequence[int]) -> Tensor:  # [B, V] fp32
    """Log-probs of the distribution that each row is sampled from."""
    logits = logits.float().clone()
    _mask_ends(logits, rows, stop_ids)
    _penalise_repetition(logits, rows)
    samplings = [row.sampling for row in rows]
    logits /= logits.new_tensor([1.0 if s.greedy else s.temperature for s in samplings])[:, None]
    if any(s.top_k or s.top_p < 1 for s in samplings if not s.greedy):
        logits = _cut_tails(logits, samplings)
    return torch.log_softmax(logits, dim=-1)


def choose(logprobs: Tensor, rows: Sequence[RowState], generator: torch.Generator) -> Tensor:  # [B]
    """One token a row."""
    sampled = torch.multinomial(logprobs.exp(), num_samples=1, generator=generator)[:, 0]
    greedy = torch.tensor([row.sampling.greedy for row in rows], device=logprobs.device)
    return torch.where(greedy, logprobs.argmax(dim=-1), sampled)


def _mask_ends(logits: Tensor, rows: Sequence[RowState], stop_ids: Sequence[int]) -> None:
    early = [i for i, row in enumerate(rows) if row.num_tokens < row.sampling.min_tokens]
    if early:
        index = torch.tensor(early, device=logits.device)[:, None]
        logits[index, torch.tensor(stop_ids, device=logits.device)] = -torch.inf


def _penalise_repetition(logits: Tensor, rows: Sequence[RowState]) -> None:
    for i, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(row.seen)), device=logits.device)
            values, penalty = logits[i, seen], row.sampling.repetition_penalty
            logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)


def _cut_tails(logits: Tensor, samplings: Sequence[schema.Sampling]) -> Tensor:
    size = logits.shape[-1]
    top_k = torch.tensor([size if s.greedy or not s.top_k else min(s.top_k, size) for s in samplings])
    top_p = torch.tensor([1.0 if s.greedy else s.top_p for s in samplings])
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(size, device=logits.device)[None]
    ordered = ordered.masked_fill(rank >= top_k.to(logits.device)[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    # A token stays while those before it have not reached top_p; the first one always does.
    before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((before >= top_p.to(logits.device)[:, None]) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
