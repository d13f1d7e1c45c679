"""Shards a policy over the ranks and gathers it for passes (FSDP2).

    each decoder layer by itself ─┐
    embeddings, last norm, head  ─┴─► with the policy: gathered from the forward pass to the backward pass

A bfloat16 model keeps fp32 masters. In each pass a layer's part is cast, gathered and freed again; gradients are bf16
within a rank, and fp32 when summed over ranks. This also holds for a single rank: it computes the same, and never has
more than two layers in bf16. Frozen parameters are stored in bf16.

Ranks of a context group hold different shards, and compute different parts of the same rows
(`learner.parallel.context`). Divided experts (`learner.layout.experts`) are sharded separately, over the ranks that
hold the same ones. Their gradients already cover the tokens of the whole expert group, so FSDP's mean over fewer ranks
is divided by the remaining factor.

The same holds for layers that ranks share (`learner.parallel.tensor`). Ranks of such a group have the same tokens, and
each computes the gradients of undivided weights; the loss is weighted accordingly (`World.addends`).

Replicas of a model (`learner.layout.replicas`) sum their gradients once a pass, after their last micro-batch: they
exchange a shard in fp32, however many micro-batches there are. No GPU has run this.

`on_host`: shards, gradients and optimizer state stay in host memory; layers pass through the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from streamrl.learner.parallel.dtensors import with_rows
from streamrl.learner.parallel.experts import divide
from streamrl.learner.parallel.tensor import divide as divide_layers
from streamrl.learner.process.ranks import World

# Inputs are not cast: positions stay fp32.
_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

Wrapped = TypeVar("Wrapped", bound=nn.Module)  # a policy: a module that contains a transformers model


def shard(policy: Wrapped, world: World, *, on_host: bool = False, in_half: bool = False) -> Wrapped:
    if world.size == 1 and not on_host and not in_half:
        return policy
    model, mesh = _model_of(policy), world.mesh()
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else OffloadPolicy()
    precision = _HALF if in_half else MixedPrecisionPolicy()
    if world.layout.experts > 1:
        over, among = world.expert_meshes()
        for experts in divide(model, among):
            fully_shard(experts, mesh=over, offload_policy=offload, mp_policy=precision)
            experts.set_all_reduce_hook(partial(_divide, by=among.size()))  # type: ignore[operator]  # FSDP's method
    if world.layout.tensor > 1:
        over, among = world.tensor_meshes()
        for shared in divide_layers(model, among):
            if shared.of_heads:
                [first, *_] = fully_shard([*shared.of_heads], mesh=mesh, offload_policy=offload, mp_policy=precision)
                first.set_all_reduce_hook(partial(_divide, by=1 / among.size()))  # each rank has its own heads' share
            fully_shard(shared.module, mesh=over, offload_policy=offload, mp_policy=precision)
    for block in layers_of(model):
        fully_shard(block, mesh=mesh, offload_policy=offload, mp_policy=precision)
    fully_shard(policy, mesh=mesh, offload_policy=offload, mp_policy=precision)
    for method in ("plain", "head_fits"):
        register_fsdp_forward_method(policy, method)
    return policy


def let_replicas_add_up(policy: nn.Module, *, now: bool) -> None:
    """Sum gradients over replicas in the next backward pass if `now`; until then each replica accumulates its own."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(now)


def unfilled(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy of the model with its parameters on `meta`, tied ones still tied."""
    known = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known)


def gathered_in_half(trial: nn.Module, unfilled: Wrapped, world: World, *, on_host: bool) -> Wrapped:
    """The unfilled policy with the weights of `trial`, sharded so as to be gathered in bf16."""
    for parameter in unfilled.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    policy = shard(unfilled, world, on_host=on_host, in_half=True)
    place = torch.device("cpu") if on_host else world.device
    for ours, theirs in zip(policy.parameters(), trial.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        rows = theirs.to_local() if isinstance(theirs, DTensor) else theirs
        held = with_rows(ours, rows.detach().to(place, ours.dtype))
        swap_tensors(ours, nn.Parameter(held, requires_grad=ours.requires_grad))
    return policy


def _divide(
    gradient: torch.Tensor, *, by: float, stream: Callable[[torch.device], torch.Stream] = torch.cuda.current_stream
) -> None:
    """FSDP calls this after the reduce-scatter. `stream`: the current one, in which FSDP also uses the result."""
    gradient.div_(by)
    if gradient.is_cuda:
        # FSDP allocates it in the reduce-scatter stream, adds it to earlier gradients in this one, and drops it without
        # waiting. Without this the next layer's reduce-scatter could reuse the memory while it is still being read.
        # FSDP itself keeps a reference only if replicas all-reduce.
        gradient.record_stream(stream(gradient.device))


def _model_of(policy: nn.Module) -> transformers.PreTrainedModel:
    return next(module for module in policy.modules() if isinstance(module, transformers.PreTrainedModel))


def layers_of(model: transformers.PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that are sharded and gathered separately."""
    return _outermost(model, set(model._no_split_modules or ()))


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """The outermost modules of these classes: some families also name parts of layers.

    FSDP derives a class for each layer, so base classes count.
    """
    for child in module.children():
        if any(kind.__name__ in names for kind in type(child).__mro__):
            yield child
        else:
            yield from _outermost(child, names)
