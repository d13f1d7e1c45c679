"""How the policy and its frozen reference come into memory, and what their tokenizer says.

    built without memory ─► adapters ─► sharded ─► each rank reads its own rows ─► packing tried against the bare model
                                                          in bfloat16: sharded once more, to be gathered in that ◄─┘

Masters are fp32. How they lie over ranks, and are gathered in bf16 for a pass, is for `learner.model.shard`. This is
the one file that loads transformers models:

    the files hold each parameter under its own name, as floating numbers?
        yes    built on `meta`, without memory; once it is sharded, each rank reads its own rows of each file
        no     loaded whole on each rank by transformers, which converts, renames and makes up what is missing

So no rank ever holds more of a model of the usual kind than its own shard. What the files do not hold, such as the
frequencies of rotations, is computed on the host either way, so that both ways give the same bits. Blocks on the disk,
and on the hub where the model is not here yet.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils import swap_tensors
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError
from streamrl.learner.model.logprobs import Head
from streamrl.learner.model.lora import base_name, inject_adapters, place_adapters
from streamrl.learner.model.memory import Sizes, refuse_too_large
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.routers import prepare_mixture
from streamrl.learner.model.settle import settle
from streamrl.learner.model.shard import gathered_in_half, shard, unfilled
from streamrl.learner.model.tensors import held_rows
from streamrl.learner.model.ways import MASKED, attention_of, choose, refuse_long
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.fingerprint import fingerprint, stop_ids

_HOST = torch.device("cpu")
# What transformers raises of a model that is incomplete, unknown, or asks for a package that is not here.
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, SafetensorError)
_LOADED = "be loaded as a causal language model"
_NUMBERS = ("F64", "F32", "F16", "BF16")  # what may be cast to the parameter's dtype without asking anybody

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    path: Path
    name: str  # within the file


# Where each parameter of a model lies, by its name before adapters; nothing, for a model that is whole already.
Sources = Mapping[str, Source]


def load_policy(config: schema.Config, world: World, end_ids: tuple[int, ...]) -> Policy:
    """The model to train, as the hub or the folder has it, with fp32 masters, or float64 ones."""
    attention = choose(config.model, world.device)
    model, sources = begin_model(config.model.path, attention=attention, device=world.device)
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
        _checkpoint(model, is_wished=config.model.gradient_checkpointing is True)
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


def _checkpoint(model: transformers.PreTrainedModel, *, is_wished: bool) -> None:
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
    model, sources = begin_model(config.model.path, attention=choose(config.model, world.device), device=world.device)
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
def read_weights(model: nn.Module, sources: Sources) -> None:
    """What this rank holds; adapters stay as they are."""
    for name, parameter in model.named_parameters():
        source = sources.get(base_name(name))
        if source is not None:
            _read(source, parameter)


def _read(source: Source, parameter: torch.Tensor) -> None:
    first, rows = held_rows(parameter)
    # Opened for each tensor: pages of a file count as this process's memory for as long as it is open.
    with safe_open(source.path, framework="pt") as file:
        rows.copy_(file.get_slice(source.name)[first : first + len(rows)])


def begin_model(path: str, *, attention: str, device: torch.device) -> tuple[transformers.PreTrainedModel, Sources]:
    """The model on `meta` with what is to be read into it; or whole on the device, and nothing to read."""
    model = build_model(path, attention)
    try:
        sources = _match(model, path)
    except (OSError, SafetensorError, _Unlike) as reason:
        log.info("weights are loaded whole", model=path, reason=str(reason))
        model = load_model(path, attention=attention)
        nn.Module.to(model, device)
        return model, {}
    _move_buffers(model, lambda buffer: buffer.to(device))
    return model, sources


class _Unlike(Exception):
    """The files are not simply the model's parameters."""


def _match(model: transformers.PreTrainedModel, path: str) -> dict[str, Source]:
    if get_model_conversion_mapping(model, add_legacy=False):
        raise _Unlike(f"{type(model).__name__} is converted when it is loaded")
    found = _sources(path)
    names = defaultdict(list)  # all that a parameter is called by: a tied head is the embedding too
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    if others := set(model.state_dict()) - {name for called in names.values() for name in called}:
        raise _Unlike(f"{min(others)} is no parameter")
    matched = {}
    for parameter, called in names.items():
        held = [found[name] for name in called if name in found]
        if len(held) != 1:
            raise _Unlike(f"the files hold {called[0]} {len(held)} times")
        [(source, dtype, shape)] = held
        if dtype not in _NUMBERS or not shape or shape != tuple(parameter.shape):  # a scalar has no rows
            raise _Unlike(f"{source.name} is {dtype} {shape} in the files")
        matched[called[0]] = source
    return matched


def _sources(path: str) -> dict[str, tuple[Source, str, tuple[int, ...]]]:
    """(where, dtype, shape) of each tensor in the files."""
    found = {}
    for file_path in _weight_files(path):
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(name)
                found[name] = (Source(path=file_path, name=name), piece.get_dtype(), tuple(piece.get_shape()))
    return found


def _weight_files(path: str) -> Sequence[Path]:
    """In the folder, or in the hub's cache; OSError when there are none."""
    try:
        return [_file(path, SAFE_WEIGHTS_NAME)]
    except OSError:
        index = json.loads(_file(path, SAFE_WEIGHTS_INDEX_NAME).read_bytes())
        return [_file(path, name) for name in sorted(set(index["weight_map"].values()))]


def _file(path: str, name: str) -> Path:
    found = cached_file(path, name)
    assert found is not None, "what is not there is an OSError"
    return Path(found)


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
