"""A model as its folder or the hub has it, and how it comes into memory: the one file that loads transformers models.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from streamrl.errors import DataError
from streamrl.learner.model.attention import MASKED
from streamrl.learner.model.lora import base_name
from streamrl.learner.model.tensors import held_rows
from streamrl.learner.model.ways import attention_of

# What transformers raises of a model that is incomplete, unknown, or asks for a package that is not here.
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, NotImplementedError, RuntimeError)
_NUMBERS = ("F64", "F32", "F16", "BF16")  # what may be cast to the parameter's dtype without asking anybody

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    path: Path
    name: str  # within the file


# Where each parameter of a model lies, by its name before adapters; nothing, for a model that is whole already.
Sources = Mapping[str, Source]


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
    model = _build(path, attention)
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


def _build(path: str, attention: str) -> transformers.PreTrainedModel:
    """Parameters on `meta`; buffers on the host, with what the model computes into them."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_no_dropout(path))
        with torch.device("meta"):
            model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention_of(config, attention)
            )
    except _UNLOADABLE as error:
        raise unusable(path, "be loaded as a causal language model", error) from error
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
    try:
        attention = attention_of(transformers.AutoConfig.from_pretrained(path), attention)
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention, **_no_dropout(path)
        )
    except _UNLOADABLE as error:
        raise unusable(path, "be loaded as a causal language model", error) from error
    return model


def _no_dropout(path: str) -> dict[str, float]:
    """Dropout would make pi differ from what the engine sampled from; so would other noise of training."""
    marks = ("dropout", "pdrop", "layerdrop", "dropout_prob", "jitter_noise")
    settings = read_config(path).to_dict()
    return {name: 0.0 for name, value in settings.items() if isinstance(value, float) and name.endswith(marks)}


def read_config(path: str) -> transformers.PretrainedConfig:
    try:
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise unusable(path, "be read", error) from error
    return config


def unusable(path: str, what: str, error: Exception) -> DataError:
    return DataError(f"model.path {path!r} cannot {what}: {(str(error).splitlines() or [repr(error)])[0]}")
