"""How the policy and its frozen reference come into memory, and what their tokenizer says.

    built without memory ─► adapters ─► sharded ─► each rank reads its own rows ─► packing tried against the bare model
                                                          in bfloat16: sharded once more, to be gathered in that ◄─┘

Masters are fp32. How they lie over ranks, and are gathered in bf16 for a pass, is for `learner.model.shard`. This is
the one file that loads transformers models:

    is it known how each parameter comes of the files (`converted`), experts stacked and four bits unpacked included?
        yes    built on `meta`, without memory; once it is sharded, each rank reads its own rows (`sources`)
        no     loaded whole on each rank by transformers, where the machine has room for that

So no rank holds more of a model than its own shard and a piece of a file. What the files do not hold, such as the
frequencies of rotations, is computed on the host either way, so that both ways give the same bits. Blocks on the disk,
and on the hub where the model is not here yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.utils import swap_tensors

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError, ResourceError
from streamrl.host import available_memory
from streamrl.learner.model.converted import Unlike, sources_of
from streamrl.learner.model.logprobs import Head
from streamrl.learner.model.lora import base_name, inject_adapters, place_adapters
from streamrl.learner.model.memory import refuse_too_large
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.routers import prepare_mixture
from streamrl.learner.model.settle import settle
from streamrl.learner.model.shard import gathered_in_half, shard, unfilled
from streamrl.learner.model.sizes import Sizes
from streamrl.learner.model.sources import Files, Source, Sources, read_rows
from streamrl.learner.model.tensors import empty_like
from streamrl.learner.model.ways import MASKED, attention_of, choose, refuse_long
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.fingerprint import fingerprint, stop_ids
from streamrl.terminal import size

_HOST = torch.device("cpu")
# What transformers raises of a model that is incomplete, unknown, or asks for a package that is not here.
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, SafetensorError)
_LOADED = "be loaded as a causal language model"

log = structlog.get_logger(__name__)


def load_policy(config: schema.Config, world: World, end_ids: tuple[int, ...]) -> Policy:
    """The model to train, as the hub or the folder has it, with fp32 masters, or float64 ones."""
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, world=world)
    refuse_long(model, config.data.max_prompt_tokens + config.max_response_tokens)
    prepare_mixture(model, config)
    if config.model.lora is not None:
        inject_adapters(model, config.model.lora, world.device)
    if config.model.dtype == "float64":
        cast(model, torch.float64)
    if world.device.type == "cuda" and config.model.dtype == "bfloat16":
        teacher = teacher_sizes(config)
        refuse_too_large(Sizes.of(model), config, ranks=world.size, room=_room(world.device), teacher=teacher)
    if recomputes(config.model, world.device):
        on_host = world.device.type == "cuda" and config.model.activations == "cpu"
        _checkpoint(model, is_wished=config.model.gradient_checkpointing is True, on_host=on_host)
    return settled(model, sources, config, world, end_ids, on_host=config.model.masters == "cpu")


def settled(
    model: transformers.PreTrainedModel,
    sources: Sources,
    config: schema.Config,
    world: World,
    end_ids: tuple[int, ...],
    *,
    on_host: bool,
) -> Policy:
    """It lies over the ranks, and is asked in the fastest way that is right."""
    twin = unfilled(model) if config.model.dtype == "bfloat16" else None
    # Tried in fp32; what is frozen and will be half of that waits on the host meanwhile.
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    place = _HOST if on_host or (is_frozen and twin is not None) else world.device
    policy = make_policy(model, config, end_ids).train()
    policy = fill(shard(policy, world, on_host=place != world.device), sources, place)
    settle(policy, world, wished=choose(config.model, world.device))
    if twin is None:
        return policy
    return gathered_in_half(policy, make_policy(twin, config, end_ids).train(), world, on_host=on_host)


def teacher_sizes(config: schema.Config) -> Sizes | None:
    """Of a teacher that lies beside the policy; None: there is none."""
    path = None if config.teacher is None else config.teacher.path
    return None if path is None else Sizes.of(build_model(path, MASKED))


def _room(device: torch.device) -> int:
    """Bytes of a GPU that this process may take. It never ran."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def recomputes(settings: schema.Model, device: torch.device) -> bool:
    """Whether layers keep their input alone for the backward pass."""
    wished = settings.gradient_checkpointing
    return device.type == "cuda" if wished == "auto" else wished


def outline(config: schema.Config) -> transformers.PreTrainedModel:
    """The model without weights or memory for them; what can be known to be wrong is refused as `load_policy` would."""
    model = build_model(config.model.path, choose(config.model, _HOST))
    refuse_long(model, config.data.max_prompt_tokens + config.max_response_tokens)
    prepare_mixture(model, config)
    if config.model.gradient_checkpointing is True:
        _checkpoint(model, is_wished=True)
    if config.model.lora is not None:
        place_adapters(model, config.model.lora)
    return model


def _checkpoint(model: transformers.PreTrainedModel, *, is_wished: bool, on_host: bool = False) -> None:
    """`on_host`: what layers keep waits there, copied on the stream that computes. On a GPU that never ran."""
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, offload=on_host)
    except ValueError as error:
        if not is_wished:
            log.warning("all activations are kept: the model has no checkpointing", kind=type(model).__name__)
            return
        raise ConfigError(f"model.gradient_checkpointing: {type(model).__name__} has none; set it to false") from error


def load_reference(
    config: schema.Config, world: World, end_ids: tuple[int, ...], *, like: Policy | None = None, on_host: bool = False
) -> Policy:
    """The policy as it was before the run: always from `model.path`, so that resuming never moves it.

    It is asked in the way of `like`, whose micro-batches it gets.
    """
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, world=world)
    cast(model.requires_grad_(False), getattr(torch, config.model.dtype))
    reference = make_policy(model, config, end_ids)
    if like is not None:
        reference.take(like.way, like.head)
    reference = shard(reference, world, on_host=on_host)
    return fill(reference, sources, _HOST if on_host else world.device)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Its parameters, and not its buffers: rotations need their fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def fill(policy: Policy, sources: Sources, device: torch.device, *, files: Files | None = None) -> Policy:
    """Memory for what this rank holds, and its values."""
    for parameter in policy.parameters():
        if parameter.is_meta:
            empty = empty_like(parameter, device)
            swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    with files or Files() as opened:
        read_weights(policy.model, sources, opened)
    return policy


def make_policy(model: transformers.PreTrainedModel, config: schema.Config, end_ids: tuple[int, ...]) -> Policy:
    dtype = getattr(torch, config.model.dtype)
    head = Head(temperature=config.sampling.temperature, end_ids=end_ids, compute_dtype=dtype)
    return Policy(model, head=head, min_tokens=config.sampling.min_tokens, dtype=dtype)


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
    with _usable(path, "give a tokenizer", (OSError, ValueError, KeyError)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
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


@torch.no_grad()
def read_weights(model: nn.Module, sources: Mapping[str, Source], files: Files) -> None:
    """What this rank holds; adapters stay as they are."""
    for name, parameter in model.named_parameters():
        source = sources.get(base_name(name))
        if source is not None:
            read_rows(source, parameter, files)


def begin_model(path: str, *, attention: str, world: World) -> tuple[transformers.PreTrainedModel, Sources]:
    """The model on `meta` with what is to be read into it; or whole on the device, and nothing to read."""
    model = build_model(path, attention)
    try:
        sources, buffers = sources_of(model, path)
    except (OSError, SafetensorError, Unlike) as reason:
        refuse_whole(model, path, reason, ranks_here=world.here, room=available_memory())
        model = load_model(path, attention=attention)
        nn.Module.to(model, world.device)
        return model, {}
    with Files() as files:
        for name, source in buffers.items():
            read_rows(source, model.get_buffer(name), files)
    _move_buffers(model, lambda buffer: buffer.to(world.device))
    return model, sources


def refuse_whole(
    model: transformers.PreTrainedModel, path: str, reason: Exception, *, ranks_here: int, room: int
) -> None:
    """ResourceError where this machine's memory is less than its ranks take, each of which loads all of it."""
    each = 4 * sum(parameter.numel() for parameter in model.parameters())
    log.info("weights are loaded whole", model=path, reason=str(reason), each_rank=size(each), ranks_here=ranks_here)
    if each * ranks_here > room:
        raise ResourceError(
            f"model.path {path!r} is loaded whole by each rank, {size(each)} in fp32, since {reason}: "
            f"{ranks_here} here take {size(each * ranks_here)} of this machine's memory, and {size(room)} are free; "
            "name a copy of the model in safetensors of bfloat16, which is read shard by shard, or start fewer ranks "
            "on each host (learner.processes)"
        )


def build_model(path: str, attention: str) -> transformers.PreTrainedModel:
    """Parameters on `meta`; buffers on the host, with what the model computes into them."""
    with _usable(path, _LOADED, _UNLOADABLE):
        config = transformers.AutoConfig.from_pretrained(path, **_no_dropout(path))
        with torch.device("meta"):
            model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention_of(config, attention)
            )
    _move_buffers(model, lambda buffer: torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # of what has memory by now
    with suppress(OSError):  # a model need not bring one
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model


def _move_buffers(model: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, move(buffer))


def load_model(path: str, *, attention: str = MASKED) -> transformers.PreTrainedModel:
    """Whole, on the host, in fp32."""
    with _usable(path, _LOADED, _UNLOADABLE):
        attention = attention_of(transformers.AutoConfig.from_pretrained(path), attention)
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention, **_no_dropout(path)
        )
    return model


def _no_dropout(path: str) -> dict[str, float]:
    """Dropout would make pi differ from what the engine sampled from; so would other noise of training."""
    marks = ("dropout", "pdrop", "layerdrop", "dropout_prob", "jitter_noise")
    settings = read_config(path).to_dict()
    return {name: 0.0 for name, value in settings.items() if isinstance(value, float) and name.endswith(marks)}


def read_config(path: str) -> transformers.PretrainedConfig:
    with _usable(path, "be read", (OSError, ValueError)):
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(path).get_text_config()
    return config


@contextmanager
def _usable(path: str, what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """DataError where one of these errors says that the model cannot do this."""
    try:
        yield
    except errors as error:
        said = (str(error).splitlines() or [repr(error)])[0]
        raise DataError(f"model.path {path!r} cannot {what}: {said}") from error
