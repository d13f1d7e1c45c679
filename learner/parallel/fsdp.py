"""How a policy lies over the ranks, and what of it is gathered for a pass (FSDP2).

    each decoder layer by itself ─┐
    embeddings, last norm, head  ─┴─► with the policy: gathered from the forward pass to the backward pass

A model of bfloat16 keeps fp32 masters, of which a layer's part is cast, gathered and freed again in each of its passes;
gradients are bf16 within a rank, and fp32 from where ranks add theirs. That is so for a single rank, too: it computes
what many would, and never holds more than two layers in bf16. What is frozen is bf16 at rest.

Ranks of a context group hold other shards, and compute other parts of the same rows (`learner.parallel.context`).
Experts that are divided over ranks (`learner.layout.experts`) are sharded by themselves, over the ranks that hold the
same ones. Their gradients are of the tokens of the whole expert group by then; so the mean that FSDP takes over fewer
ranks than there are is divided by the rest.

So are layers that ranks share (`learner.parallel.tensor`). Ranks of such a group have the same tokens, and each
makes the gradients of what is not divided: a loss is weighed accordingly (`World.addends`).

Copies of a model (`learner.layout.replicas`) add up their gradients once a pass, when each has those of all its
micro-batches: what goes between them is a shard of fp32, however many micro-batches there are. No GPU has run this.

`on_host`: shards, gradients and what the optimizer keeps wait in the host's memory; layers pass through the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
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

from streamrl.learner.parallel.experts import divide
from streamrl.learner.parallel.tensor import divide as divide_layers
from streamrl.learner.process.ranks import World

# Modules take what they are given: positions stay fp32.
_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

Wrapped = TypeVar("Wrapped", bound=nn.Module)  # a policy: what holds a model of transformers


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
            experts.set_all_reduce_hook(partial(_divide, by=among.size()))  # type: ignore[operator]  # FSDP's, by now
    if world.layout.tensor > 1:
        over, among = world.tensor_meshes()
        for shared in divide_layers(model, among):
            if shared.of_heads:
                [first, *_] = fully_shard([*shared.of_heads], mesh=mesh, offload_policy=offload, mp_policy=precision)
                first.set_all_reduce_hook(partial(_divide, by=1 / among.size()))  # each rank has that of its own heads
            fully_shard(shared.module, mesh=over, offload_policy=offload, mp_policy=precision)
    for block in layers_of(model):
        fully_shard(block, mesh=mesh, offload_policy=offload, mp_policy=precision)
    fully_shard(policy, mesh=mesh, offload_policy=offload, mp_policy=precision)
    for method in ("plain", "head_fits"):
        register_fsdp_forward_method(policy, method)
    return policy


def let_replicas_add_up(policy: nn.Module, *, now: bool) -> None:
    """With the next backward pass, or later: until then each replica keeps the sum of its own."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(now)


def unfilled(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same model with its parameters on `meta`, those that are tied as one."""
    known = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known)


def gathered_in_half(trial: nn.Module, unfilled: Wrapped, world: World, *, on_host: bool) -> Wrapped:
    """The weights of the one in the other."""
    for parameter in unfilled.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    policy = shard(unfilled, world, on_host=on_host, in_half=True)
    place = torch.device("cpu") if on_host else world.device
    for ours, theirs in zip(policy.parameters(), trial.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        rows = theirs.to_local() if isinstance(theirs, DTensor) else theirs
        held = DTensor.from_local(
            rows.detach().to(place, ours.dtype),
            ours.device_mesh,
            ours.placements,
            shape=ours.shape,
            stride=ours.stride(),
        )
        swap_tensors(ours, nn.Parameter(held, requires_grad=ours.requires_grad))
    return policy


def _divide(gradient: torch.Tensor, *, by: float) -> None:
    gradient.div_(by)


def _model_of(policy: nn.Module) -> transformers.PreTrainedModel:
    return next(module for module in policy.modules() if isinstance(module, transformers.PreTrainedModel))


def layers_of(model: transformers.PreTrainedModel) -> Iterator[nn.Module]:
    """That lie, and are gathered, each by itself."""
    return _outermost(model, set(model._no_split_modules or ()))


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Some families name the parts of a layer as well. FSDP makes a class of each layer's own."""
    for child in module.children():
        if any(kind.__name__ in names for kind in type(child).__mro__):
            yield child
        else:
            yield from _outermost(child, names)
