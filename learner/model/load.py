"""How the policy and its frozen reference come to be, and what their tokenizer says.

    built without memory ─► adapters ─► sharded ─► each rank reads its own rows ─► packing tried against the bare model

Masters are fp32; passes run under autocast where the setting says bfloat16. With more than one rank each decoder layer
and the rest are sharded (FSDP2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.utils import swap_tensors

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError
from streamrl.learner.model.attention import choose
from streamrl.learner.model.logprobs import Head
from streamrl.learner.model.lora import inject_adapters
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.pretrained import Sources, begin_model, read_config, read_weights, unusable
from streamrl.learner.model.settle import settle
from streamrl.learner.model.ways import refuse_long
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.agreed import fingerprint, stop_ids

_HOST = torch.device("cpu")


def load_policy(config: schema.Config, world: World, end_ids: tuple[int, ...]) -> Policy:
    """The model to train, as the hub or the folder has it, with fp32 masters, or float64 ones."""
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, device=world.device)
    refuse_long(model, config.data.max_prompt_tokens + config.sampling.max_tokens)
    if config.model.lora is not None:
        inject_adapters(model, config.model.lora, world.device)
    if config.model.dtype == "float64":
        _cast(model, torch.float64)
    if config.model.gradient_checkpointing:
        _checkpoint(model)
    policy = fill(shard(make_policy(model, config, end_ids).train(), world), sources, world.device)
    settle(policy, world, wished=attention)
    return policy


def _checkpoint(model: transformers.PreTrainedModel) -> None:
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing: {type(model).__name__} has none; set it to false") from error


def load_reference(
    config: schema.Config, world: World, end_ids: tuple[int, ...], *, like: Policy | None = None, on_host: bool = False
) -> Policy:
    """The policy as it was before the run: always from `model.path`, so that resuming never moves it.

    It is asked in the way of `like`, whose micro-batches it gets.
    """
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, device=world.device)
    _cast(model.requires_grad_(False), getattr(torch, config.model.dtype))
    reference = make_policy(model, config, end_ids)
    if like is not None:
        reference.take(like.way, like.head)
    reference = shard(reference, world, on_host=on_host)
    return fill(reference, sources, _HOST if on_host else world.device)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Its parameters, and not its buffers: rotations need their fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def fill(policy: Policy, sources: Sources, device: torch.device) -> Policy:
    """Memory for what this rank holds, and its values."""
    for parameter in policy.parameters():
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    read_weights(policy.model, sources)
    return policy


def make_policy(model: transformers.PreTrainedModel, config: schema.Config, end_ids: tuple[int, ...]) -> Policy:
    dtype = getattr(torch, config.model.dtype)
    head = Head(temperature=config.sampling.temperature, end_ids=end_ids, compute_dtype=dtype)
    return Policy(model, head=head, min_tokens=config.sampling.min_tokens, dtype=dtype)


def shard(policy: Policy, world: World, *, on_host: bool = False) -> Policy:
    """Over all ranks: each decoder layer by itself, then what is left (embeddings, last norm, head) with the policy.

    `on_host`: shards wait in the host's memory, and are on the device while their layer computes.
    """
    if world.size == 1 and not on_host:
        return policy
    mesh = world.mesh()
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else OffloadPolicy()
    for block in _blocks(policy.model, set(policy.model._no_split_modules or ())):
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(policy, mesh=mesh, offload_policy=offload)
    for method in ("plain", "head_fits"):
        register_fsdp_forward_method(policy, method)
    return policy


def _blocks(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """The outermost: some families name the parts of a layer as well."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _blocks(child, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """What model and tokenizer must agree on with every worker."""

    tokenizer: transformers.PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # what ends a response, and is therefore banned before `min_tokens`
    vocabulary: int  # sizes of the model's output
    fingerprint: str


def read_tokenizer_info(path: str) -> TokenizerInfo:
    """Tokenizer and configuration, no weights."""
    config = read_config(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise unusable(path, "give a tokenizer", error) from error
    try:
        generation_eos = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model need not bring one
        generation_eos = config.eos_token_id
    ends = stop_ids(tokenizer_eos=tokenizer.eos_token_id, generation_eos=generation_eos)
    if not ends:
        raise DataError(f"model.path {path!r} has no end token, so that no response could ever end by itself")
    return TokenizerInfo(
        tokenizer=tokenizer,
        end_ids=ends,
        vocabulary=config.vocab_size,
        fingerprint=fingerprint(vocab=tokenizer.get_vocab(), stop_ids=ends, vocab_size=config.vocab_size),
    )
