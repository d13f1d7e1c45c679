"""Loads the policy and its frozen reference.

    built without memory ─► adapters ─► sharded ─► each rank reads its own rows ─► packing tried against the bare model
                                                              in bfloat16: sharded again, to be gathered in bf16 ◄─┘

Masters are fp32. `learner.parallel.fsdp` divides them over ranks and gathers them in bf16 for a pass; `build` creates
transformers' models. No rank holds more of a model than its own shard and a piece of a file, unless transformers must
load it whole. Blocks on the disk, and on the hub if the model is not here yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import torch
import transformers
from torch import nn
from torch.utils import swap_tensors

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.loading.build import begin_model, build_model
from streamrl.learner.loading.sources import Files, Source, Sources, read_rows
from streamrl.learner.model.compiled import all_compile, compile_layers, compiles, refuse_compiling, with_layers
from streamrl.learner.model.logits import Head
from streamrl.learner.model.lora import base_name, inject_adapters, place_adapters
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.settle import settle
from streamrl.learner.moe.routers import prepare_mixture
from streamrl.learner.packing.attention import MASKED, choose
from streamrl.learner.packing.ways import refuse_long
from streamrl.learner.parallel.context import ContextSplit
from streamrl.learner.parallel.dtensors import empty_like
from streamrl.learner.parallel.fsdp import gathered_in_half, shard, unfilled
from streamrl.learner.parallel.tensor import refuse_tensor
from streamrl.learner.planning.memory import refuse_too_large
from streamrl.learner.planning.recomputing import recomputes, room_on
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.process.ranks import World

_HOST = torch.device("cpu")

log = structlog.get_logger(__name__)


def load_policy(
    config: schema.Config,
    world: World,
    end_ids: tuple[int, ...],
    *,
    wait_for_readers: Callable[[], None] = lambda: None,
) -> Policy:
    """Load the model to train from the hub or a folder, with fp32 or float64 masters.

    `wait_for_readers` blocks until all ranks have downloaded the model, or read their rows, each at its disk's speed;
    collectives follow.
    """
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, world=world)
    refuse_long(model, config.data.max_prompt_tokens + config.max_response_tokens)
    prepare_mixture(model, config)
    refuse_tensor(model, config.learner.layout)
    may_fail = config.model.compile == "auto"
    config = with_layers(config, compiled=compiles(config, model, world))
    if config.model.lora is not None:
        inject_adapters(model, config.model.lora, world.device)
    if config.model.dtype == "float64":
        cast(model, torch.float64)
    sizes, teacher = Sizes.of(model), None
    if world.device.type == "cuda" and config.model.dtype == "bfloat16":
        teacher = teacher_sizes(config)
        refuse_too_large(sizes, config, ranks=world.size, room=room_on(world.device), teacher=teacher)
    inputs_on_host = world.device.type == "cuda" and config.model.activations == "cpu"
    if config.model.gradient_checkpointing is True:
        _checkpoint(model, is_wished=True, on_host=inputs_on_host)
    on_host = config.model.masters == "cpu"
    policy = settled(model, sources, config, world, end_ids, on_host=on_host, wait_for_readers=wait_for_readers)
    # What ranks decide together comes after they have waited for each other's downloads.
    config = with_layers(config, compiled=all_compile(config, world))
    if config.model.compile:
        compile_layers(policy.model, or_go_on=may_fail)
    if config.model.gradient_checkpointing == "auto" and recomputes(config, sizes, world, teacher=teacher):
        _checkpoint(policy.model, is_wished=False, on_host=inputs_on_host)
    return policy


def settled(
    model: transformers.PreTrainedModel,
    sources: Sources,
    config: schema.Config,
    world: World,
    end_ids: tuple[int, ...],
    *,
    on_host: bool,
    wait_for_readers: Callable[[], None],
) -> Policy:
    """Shard and fill the model, and choose the fastest correct way to call it."""
    twin = unfilled(model) if config.model.dtype == "bfloat16" else None
    # Tried in fp32; a model with frozen weights, which will need half of that, stays on the host meanwhile.
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    place = _HOST if on_host or (is_frozen and twin is not None) else world.device
    policy = make_policy(model, config, end_ids, world).train()
    if max(world.layout.replicas, world.layout.experts, world.layout.tensor) > 1:
        wait_for_readers()  # one may still download; groups of some of the ranks form within torch's own time, or fail
    policy = fill(shard(policy, world, on_host=place != world.device), sources, place)
    wait_for_readers()
    settle(policy, world, wished=choose(config.model, world.device))
    if twin is None:
        return policy
    in_half = gathered_in_half(policy, make_policy(twin, config, end_ids, world).train(), world, on_host=on_host)
    in_half.take(policy.way, policy.head)
    return in_half


def teacher_sizes(config: schema.Config) -> Sizes | None:
    """Sizes of a teacher that is loaded beside the policy, or None."""
    path = None if config.teacher is None else config.teacher.path
    return None if path is None else Sizes.of(build_model(path, MASKED))


def outline(config: schema.Config) -> transformers.PreTrainedModel:
    """The model without weights or memory for them; raises what `load_policy` would for known mistakes."""
    model = build_model(config.model.path, choose(config.model, _HOST))
    refuse_long(model, config.data.max_prompt_tokens + config.max_response_tokens)
    prepare_mixture(model, config)
    refuse_tensor(model, config.learner.layout)
    if config.model.compile is True:
        refuse_compiling(model)
    if config.model.gradient_checkpointing is True:
        _checkpoint(model, is_wished=True)
    if config.model.lora is not None:
        place_adapters(model, config.model.lora)
    return model


def _checkpoint(model: transformers.PreTrainedModel, *, is_wished: bool, on_host: bool = False) -> None:
    """Enable activation checkpointing.

    `on_host`: kept inputs are offloaded to the host, copied on the compute stream. No GPU has run this.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, offload=on_host)
    except ValueError as error:
        if not is_wished:
            log.warning("all activations are kept: the model has no checkpointing", kind=type(model).__name__)
            return
        raise ConfigError(
            f"model.gradient_checkpointing: {type(model).__name__} does not support it; set it to false"
        ) from error


def load_reference(
    config: schema.Config, world: World, end_ids: tuple[int, ...], *, like: Policy | None = None, on_host: bool = False
) -> Policy:
    """The policy as it was before the run: always from `model.path`, so that resuming never moves it.

    It is called in the way of `like`, whose micro-batches it gets.
    """
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, world=world)
    cast(model.requires_grad_(False), getattr(torch, config.model.dtype))
    reference = make_policy(model, config, end_ids, world)
    if like is not None:
        reference.take(like.way, like.head)
    reference = shard(reference, world, on_host=on_host)
    return fill(reference, sources, _HOST if on_host else world.device)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters but not the buffers: rotary frequencies need fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def fill(policy: Policy, sources: Sources, device: torch.device, *, files: Files | None = None) -> Policy:
    """Allocate what this rank holds, and read its values; move those of a model that was loaded whole, and is not
    sharded."""
    for parameter in policy.parameters():
        if parameter.is_meta or parameter.device != device:
            held = empty_like(parameter, device) if parameter.is_meta else parameter.detach().to(device)
            swap_tensors(parameter, nn.Parameter(held, requires_grad=parameter.requires_grad))
    with files or Files() as opened:
        read_weights(policy.model, sources, opened)
    return policy


@torch.no_grad()
def read_weights(model: nn.Module, sources: Mapping[str, Source], files: Files) -> None:
    """Read what this rank holds; adapters stay unchanged."""
    for name, parameter in model.named_parameters():
        source = sources.get(base_name(name))
        if source is not None:
            read_rows(source, parameter, files)


def make_policy(
    model: transformers.PreTrainedModel, config: schema.Config, end_ids: tuple[int, ...], world: World
) -> Policy:
    """The policy over whole rows, or over this rank's part of them."""
    dtype = getattr(torch, config.model.dtype)
    head = Head(temperature=config.sampling.temperature, end_ids=end_ids, compute_dtype=dtype)
    policy = Policy(model, head=head, min_tokens=config.sampling.min_tokens, dtype=dtype)
    split = ContextSplit.among(world)
    if split is not None:
        policy.share_out(split)
    return policy
