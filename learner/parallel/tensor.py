"""Tensor parallelism: the ranks of a tensor group share each layer's attention heads and MLP width.

    hidden states     the same on every rank of the group, which all have the same tokens
      ▼ columns       q, k, v, gate, up: a rank has some rows of each weight, hence some heads and some of the width
      │               attention, activations: unchanged, on these alone
      ▼ rows          o, down: a rank has some columns of each weight, and computes a partial sum
      ▼ all-reduce
    hidden states     the same on every rank; backward, gradients are summed where the columns began

    adapters B A      for columns a rank has all of A and its rows of B: A's gradient is summed
                      for rows it has all of both, and uses its columns of A: A x is summed, and A's gradient joined

transformers' plan of the model (`base_model_tp_plan`) names these linear layers. Modules in no plan are computed on
every rank: norms, embeddings, routers. For the head, each rank computes the log-probs of some of the tokens, and sends
some of them to the experts of a mixture (`experts`). A model without a plan, or whose plan has more than columns, rows
and norms of heads, is refused.

A rank stores rows of every weight, so one run of it: FSDP shards them further, over the ranks that hold the same rows.
For the row-wise layers a pass exchanges rows for columns, and returns the gradient in rows: these weights cross the
group once more in each pass, and nothing else in the learner knows about columns.

Each exchange blocks until the group's ranks have joined. No GPU has run this, by NCCL; bfloat16 adapters have run
nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.parallel.context import Sharers, swap
from streamrl.learner.parallel.dtensors import local, part_of
from streamrl.learner.parallel.experts import experts_of, share_tokens
from streamrl.learner.parallel.sums import entering, total

KEY = "learner.layout.tensor"
# transformers' names.
_COLUMNS, _ROWS, _OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"


class Undividable(Exception):
    """Why ranks cannot share a model's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer, with its adapter's factors if it has one."""

    linear: nn.Linear
    factors: tuple[nn.Linear, nn.Linear] | None  # A [r, in], B [out, r]

    @classmethod
    def of(cls, module: Any) -> Layer:
        """The layer of a module that peft may have wrapped; without `base_layer` it is not wrapped."""
        linear = getattr(module, "base_layer", None)
        if linear is None:
            return cls(linear=module, factors=None)
        [inner], [outer] = module.lora_A.values(), module.lora_B.values()
        return cls(linear=linear, factors=(inner, outer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A module from hidden states to hidden states, with part of the width between its columns and rows."""

    module: nn.Module
    columns: Sequence[Layer]
    rows: Sequence[Layer]
    of_heads: Sequence[nn.Module]  # norms of queries or keys per head, with weights shared by all heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What ranks can share of a model's layers."""

    max_ranks: int  # number of ranks must divide this; 1: nothing to share
    weights: int  # in all layers
    trained: int  # of these
    of_rows: int  # of these, in rows that are exchanged for columns

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Shared:
        try:
            blocks = _blocks(model)
        except Undividable:
            return cls(max_ranks=1, weights=0, trained=0, of_rows=0)
        rows = [layer.linear.weight for block in blocks for layer in block.rows]
        each = [*rows, *(layer.linear.weight for block in blocks for layer in block.columns)]
        trained = (weight for weight in each if weight.requires_grad)
        weights, own, of_rows = (sum(weight.numel() for weight in some) for some in (each, trained, rows))
        return cls(max_ranks=_max_ranks(model), weights=weights, trained=own, of_rows=of_rows)


def refuse_tensor(model: transformers.PreTrainedModel, layout: schema.Layout) -> None:
    """Raise ConfigError if so many ranks cannot share each layer."""
    ranks, kind = layout.tensor, type(model).__name__
    if ranks == 1:
        return
    try:
        _blocks(model)
    except Undividable as reason:
        problem = f"{KEY} = {ranks}: ranks cannot share the layers of {kind} ({reason})"
        raise ConfigError(f"{problem}; set it to 1") from reason
    config = model.config.get_text_config()
    heads, kv_heads = _heads(config)
    if (limit := _max_ranks(model)) % ranks:
        sizes = f"{heads} attention heads, {kv_heads} of keys and values, an MLP {config.intermediate_size} wide and "
        sizes += f"hidden states {config.hidden_size} wide"
        raise ConfigError(
            f"{KEY} = {ranks}: {kind} has {sizes}, which {ranks} ranks cannot share; set one of {_divisors(limit)}"
        )
    own = heads // ranks
    if layout.context > own:
        problem = (
            f"learner.layout.context = {layout.context}: with {KEY} = {ranks} a rank has {own} of the attention heads"
        )
        raise ConfigError(f"{problem} of {kind}; set it to {own} or less")


def divide(model: transformers.PreTrainedModel, mesh: DeviceMesh) -> Sequence[Block]:
    """Divide the layers over the mesh; return the blocks, which now keep only this rank's part.

    Divides nothing in a teacher that cannot be divided: each rank then has all of it.
    """
    sharers = Sharers(at=mesh.get_local_rank(), of=mesh.size(), group=mesh.get_group())
    try:
        blocks = _blocks(model)
    except Undividable:
        return []
    if _max_ranks(model) % sharers.of:
        return []
    for block in blocks:
        for layer in block.columns:
            _share_columns(layer, sharers, mesh)
        for layer in block.rows:
            _share_rows(layer, sharers, mesh)
        block.module.register_forward_pre_hook(partial(_begin, sharers), with_kwargs=True)
    vars(model)["sharers"] = sharers
    share_tokens(model, sharers)
    return blocks


def sharers_of(model: transformers.PreTrainedModel) -> Sharers | None:
    """This rank's place among those that share the model's layers; None if it has whole layers."""
    found: Sharers | None = vars(model).get("sharers")
    return found


def _blocks(model: transformers.PreTrainedModel) -> list[Block]:
    decoder = decoder_of(model)
    styles = _styles(model, decoder)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in styles)
    if not owners:
        raise Undividable("transformers has no plan for it")
    return [_block(name, decoder.get_submodule(name), styles) for name in owners]


def _styles(model: transformers.PreTrainedModel, decoder: nn.Module) -> dict[str, str]:
    """The plan's style of each module in a layer."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    experts, found = tuple(f"{name}." for name, _ in experts_of(decoder)), {}
    for name, _ in decoder.named_modules():
        if f"{name}.".startswith(experts):  # learner.layout.experts divides them
            continue
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and "." in name:  # embeddings are only sharded
            found[name] = style
    return found


def _block(owner: str, module: nn.Module, styles: dict[str, str]) -> Block:
    by_style: dict[str, list[Any]] = {_COLUMNS: [], _ROWS: [], _OF_HEADS: []}
    if any(parameter is not None for parameter in module._parameters.values()):
        raise Undividable(f"{owner} has weights of its own, which transformers' plan does not cover")
    for name, child in module.named_children():
        style = styles.get(f"{owner}.{name}")
        if style is None and next(child.parameters(), None) is None:
            continue
        if style not in by_style:
            raise Undividable(f"transformers' plan for {owner}.{name} is {style or 'none'}, which is not supported")
        if style != _OF_HEADS and type(Layer.of(child).linear) is not nn.Linear:
            raise Undividable(f"{owner}.{name} is not a plain linear layer")
        by_style[style].append(child)
    if not by_style[_COLUMNS] or not by_style[_ROWS]:
        raise Undividable(f"transformers' plan has no columns for {owner}, or no rows")
    columns, rows = ([Layer.of(child) for child in by_style[style]] for style in (_COLUMNS, _ROWS))
    return Block(module=module, columns=columns, rows=rows, of_heads=by_style[_OF_HEADS])


def _max_ranks(model: transformers.PreTrainedModel) -> int:
    """The largest number of ranks that can have equal parts of everything; its divisors can too.

    Heads stay whole, even if layers have heads of different sizes.
    """
    config, shared = model.config.get_text_config(), []
    for block in _blocks(model):
        head_dim = getattr(block.module, "head_dim", None) or 1
        shared += [layer.linear.out_features // head_dim for layer in block.columns]
        shared += [layer.linear.in_features // head_dim for layer in block.rows]
        shared += [layer.linear.out_features for layer in block.rows]  # stored by rows
    return gcd(*_heads(config), *shared)


def _heads(config: transformers.PretrainedConfig) -> tuple[int, int]:
    """(number of query heads, number of key/value heads)"""
    heads: int = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _share_columns(layer: Layer, sharers: Sharers, mesh: DeviceMesh) -> None:
    _share_weight(layer.linear, mesh, bias=part_of)
    layer.linear.__class__ = _LocalLinear
    if layer.factors is not None:
        inner, outer = layer.factors
        _keep(inner, "weight", _copy_of(inner.weight, mesh))
        _keep(outer, "weight", part_of(outer.weight, mesh))
        inner.__class__, outer.__class__ = _ColumnFactorA, _LocalLinear
        vars(inner)["sharers"] = sharers


def _share_rows(layer: Layer, sharers: Sharers, mesh: DeviceMesh) -> None:
    _share_weight(layer.linear, mesh, bias=_copy_of)
    layer.linear.__class__ = _RowLinear
    vars(layer.linear)["sharers"] = sharers
    if layer.factors is not None:
        inner, outer = layer.factors
        for factor in layer.factors:
            _keep(factor, "weight", _copy_of(factor.weight, mesh))
        inner.__class__, outer.__class__ = _RowFactorA, _LocalLinear
        vars(inner)["sharers"] = sharers


def _share_weight(linear: nn.Linear, mesh: DeviceMesh, *, bias: Callable[[torch.Tensor, DeviceMesh], DTensor]) -> None:
    _keep(linear, "weight", part_of(linear.weight, mesh))
    if linear.bias is not None:
        _keep(linear, "bias", bias(linear.bias, mesh))


def _keep(linear: nn.Linear, leaf: str, part: DTensor) -> None:
    setattr(linear, leaf, nn.Parameter(part, requires_grad=getattr(linear, leaf).requires_grad))


def _copy_of(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A replicated tensor: every rank has it whole, and the first reports it."""
    return DTensor.from_local(tensor.detach().clone(), mesh, [Replicate()], run_check=False)


class _LocalLinear(nn.Linear):
    """A linear layer computed with the local part of its weight."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, local(self.weight), None if self.bias is None else local(self.bias))


class _ColumnFactorA(nn.Linear):
    """Factor A of a column-wise adapter, whose B is divided: its gradient is summed over ranks."""

    sharers: Sharers

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, entering(self.sharers, local(self.weight)))


class _RowFactorA(nn.Linear):
    """Factor A of a row-wise adapter: takes this rank's part of the width, and returns the sum over ranks."""

    sharers: Sharers

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        columns = entering(self.sharers, local(self.weight)).chunk(self.sharers.of, dim=1)[self.sharers.at]
        return total(self.sharers, F.linear(inner, columns))


class _RowLinear(nn.Linear):
    sharers: Sharers

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        [columns] = swap(self.sharers, local(self.weight), cut=1, join=0)
        hidden = total(self.sharers, F.linear(inner, columns))
        return hidden if self.bias is None else hidden + local(self.bias).to(hidden.dtype)


def _begin(sharers: Sharers, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a block: inputs are whole, and their gradients are summed over ranks."""
    return tuple(entering(sharers, x) for x in args), {name: entering(sharers, x) for name, x in kwargs.items()}
