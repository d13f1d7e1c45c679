"""Expert parallelism: experts are divided over the ranks of an expert group; tokens travel to their experts and back.

    [tokens x k]  sorted by expert ─► counts, rows ─► all-to-all ─► sorted by expert here ─► gate, up, down
    [tokens, H]  ◄─ weighted sum of k ◄─ reordered ◄─ all-to-all ◄─ in order of arrival ◄───────────┘

Rank e of a group of N holds the E/N experts from e E/N on, cut along the first dimension of each of their parameters;
FSDP shards these over the ranks that hold the same ones. So a rank's part of a parameter is one run of the whole, as
elsewhere.

Ranks that share layers (`learner.layout.tensor`) have the same tokens. Each sends some of them to their experts, which
may be divided or not, and all get the results.

Only the dispatch is ours, the rest is the model's: transformers calls a mixture's experts through a registry, and this
is one more entry in it. Matrix products are grouped (`grouped_mm`) for 16-bit dtypes, and sequential otherwise. All
ranks of a group make the same collectives in the same order, even without tokens: per layer the counts and the rows
there and back, and the rows in the backward pass. Each blocks until all of the group have joined. On a GPU the host
synchronises on the counts of each layer, since it sets the sizes of the exchange. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from streamrl.errors import ConfigError
from streamrl.learner.parallel.context import Sharers
from streamrl.learner.parallel.dtensors import local, part_of
from streamrl.learner.parallel.sums import TokenShare

KEY = "learner.layout.experts"
OURS = "streamrl_experts"  # name in transformers' registry
_GROUPED = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # grouped kernels need rows of a multiple of so many bytes


class Exchange(Protocol):
    """Communication within an expert group. A double of it answers what FakeTensors cannot."""

    def counts(self, given: torch.Tensor) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
        """Exchange the number of rows per expert: [N, E/N] given -> taken.

        Also returns the total rows given to and taken from each rank.
        """
        ...

    def swap(self, rows: torch.Tensor, give: Sequence[int], take: Sequence[int]) -> torch.Tensor: ...


class GroupExchange:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def counts(self, given: torch.Tensor) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        give, take = torch.stack([given.sum(1), taken.sum(1)]).tolist()
        return taken, give, take

    def swap(self, rows: torch.Tensor, give: Sequence[int], take: Sequence[int]) -> torch.Tensor:
        return all_to_all_single(rows, list(take), list(give), self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """An experts module's group."""

    exchange: Exchange
    size: int  # ranks of the group


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a layer's experts as stacked parameters, called through transformers' registry."""
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
            yield name, module


def active_shares(model: transformers.PreTrainedModel) -> dict[torch.Tensor, float]:
    """Expert parameter -> the fraction of it that a token uses."""
    config = model.config.get_text_config()
    per_token = getattr(config, "num_experts_per_tok", None) or 0
    chosen = max(per_token) if isinstance(per_token, list) else per_token  # some models have one value per layer
    parameters = [parameter for _, module in experts_of(model) for parameter in module.parameters()]
    return {parameter: min(1.0, chosen / len(parameter)) if chosen else 1.0 for parameter in parameters}


def refuse_experts(model: transformers.PreTrainedModel, ranks: int) -> None:
    """Raise ConfigError if so many ranks cannot share each layer's experts."""
    nums = {len(next(module.parameters())) for _, module in experts_of(model)}
    if ranks > 1 and not nums:
        kind = type(model).__name__
        raise ConfigError(f"{KEY} = {ranks}: {kind} has no experts that can be divided; set it to 1")
    for num in nums:
        if num % ranks:
            raise ConfigError(
                f"{KEY} = {ranks}: a layer has {num} experts, not a multiple of {ranks}; set a divisor of {num}"
            )


def divide(model: transformers.PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts over the mesh; return the modules, which now keep only this rank's experts.

    Divides nothing in a reference or teacher whose experts do not divide.
    """
    size = mesh.size()
    found = [module for _, module in experts_of(model)]
    if any(len(parameter) % size for module in found for parameter in module.parameters()):
        return []
    made = Divided(exchange=GroupExchange(mesh.get_group()), size=size)
    for module in found:
        for leaf, parameter in list(module.named_parameters()):
            setattr(module, leaf, nn.Parameter(part_of(parameter, mesh), requires_grad=parameter.requires_grad))
        vars(module)["divided"] = made
    if found:
        use_our_experts(model)
    return found


def share_tokens(model: transformers.PreTrainedModel, sharers: Sharers) -> None:
    """Split the tokens among ranks that have the same ones."""
    modules = [module for _, module in experts_of(model)]
    for module in modules:
        vars(module)["sharers"] = sharers
    if modules:
        use_our_experts(model)


def use_our_experts(model: transformers.PreTrainedModel) -> None:
    """Call experts through `experts_forward` from now on, which also supports float64."""
    ALL_EXPERTS_FUNCTIONS.register(OURS, experts_forward)
    model.set_experts_implementation(OURS)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,  # [tokens, H]
    top_k_index: torch.Tensor,  # [tokens, k] the experts that the router chose
    top_k_weights: torch.Tensor,  # [tokens, k]
) -> torch.Tensor:  # [tokens, H]
    """The entry in transformers' registry of experts functions."""
    sharers: Sharers | None = vars(module).get("sharers")
    if sharers is None:
        return _experts_forward(module, hidden_states, top_k_index, top_k_weights)
    share = TokenShare(sharers, len(hidden_states), hidden_states.device)
    [found] = share.gathered(
        _experts_forward(module, share.taken(hidden_states), top_k_index[share.own_tokens], share.taken(top_k_weights))
    )
    return found


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    divided: Divided | None = vars(module).get("divided")
    local_weights = _Weights.of(module)
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    size = 1 if divided is None else divided.size
    given = torch.zeros(local_weights.num * size, dtype=torch.int64, device=chosen.device)
    given = given.scatter_add_(0, chosen, torch.ones_like(chosen)).view(size, local_weights.num)
    rows = hidden_states[order // top_k_index.shape[1]]
    computed = (
        local_weights.compute(rows, given[0])
        if divided is None
        else _compute_remotely(rows, given, local_weights, divided.exchange)
    )
    weighted = computed[_inverse(order)].view(*top_k_index.shape, computed.shape[-1]) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def _compute_remotely(
    rows: torch.Tensor, given: torch.Tensor, local_weights: _Weights, exchange: Exchange
) -> torch.Tensor:
    """Compute rows [S, H], sorted by expert, on the ranks of their experts. `given`: [N, E/N]."""
    taken, give, take = exchange.counts(given)
    arrived = exchange.swap(rows, give, take)
    # Rows arrive grouped by rank, and within each rank by expert.
    of = torch.arange(local_weights.num, device=rows.device).repeat(len(taken))
    by_expert = of.repeat_interleave(taken.flatten(), output_size=sum(take)).argsort(stable=True)
    computed = local_weights.compute(arrived[by_expert], taken.sum(0))
    return exchange.swap(computed[_inverse(by_expert)], take, give)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Weights of the local experts, gathered by FSDP."""

    up: torch.Tensor  # [experts, out, in], or [experts, in, out] if the module stores them transposed
    up_bias: torch.Tensor | None  # [experts, out]
    down: torch.Tensor
    down_bias: torch.Tensor | None
    transposed: bool
    activate: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, module: Any) -> _Weights:
        name = "gate_up_proj" if module.has_gate else "up_proj"
        return cls(
            up=local(getattr(module, name)),
            up_bias=local(getattr(module, f"{name}_bias")) if module.has_bias else None,
            down=local(module.down_proj),
            down_bias=local(module.down_proj_bias) if module.has_bias else None,
            transposed=module.is_transposed,
            activate=module._apply_gate if module.has_gate else module.act_fn,
        )

    @property
    def num(self) -> int:
        return len(self.up)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute rows [S, H], sorted by expert."""
        inner = self.activate(self._linear(rows.to(self.up.dtype), self.up, self.up_bias, counts))
        return self._linear(inner, self.down, self.down_bias, counts)

    def _linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        matrix = weight if self.transposed else weight.transpose(1, 2)  # [experts, in, out]
        if _can_be_grouped(rows, matrix):
            out = F.grouped_mm(rows, matrix, offs=counts.cumsum(0, dtype=torch.int32))
            if bias is not None:
                out = out + bias.repeat_interleave(counts, dim=0, output_size=len(rows))
            return out
        # Include experts without rows: their gradient is zero, and FSDP waits for it.
        parts = rows.split(counts.tolist())
        made = [part @ one for part, one in zip(parts, matrix, strict=True)]
        if bias is not None:
            made = [part + one for part, one in zip(made, bias, strict=True)]
        return torch.cat(made)


def _can_be_grouped(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    widths = [width * matrix.element_size() for width in matrix.shape[1:]]
    return len(rows) > 0 and matrix.dtype in _GROUPED and not any(width % _ALIGNED for width in widths)
