"""Maps each parameter to the file tensors that it is made of, by transformers' rules, without reading any.

    names in the files ─► transformers' renamings, and at most one of its converters each ─► sources of a parameter

A model can be read row by row if its files hold plain numbers and its converters are of the kinds below; transformers
itself resolves names. `Unlike`: anything else, which transformers must load. Reads only headers, and the hub if the
model is not here yet.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from streamrl.learner.loading.sources import Cut, Joined, Source, Sources, Stacked, Stored, Unpacked

_NUMBERS = ("F64", "F32", "F16", "BF16")  # plain dtypes, which can be cast to the parameter's
UNPACKED = "mxfp4"  # the only quantisation that is undone here

_Held = dict[str, list[Source]]  # pattern -> sources, as passed between transformers' conversion operations


class Unlike(Exception):
    """The files are not simply the model's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The sources of one target of the rules."""

    converter: WeightConverter | None
    held: _Held = field(default_factory=lambda: defaultdict(list))


def sources_of(model: transformers.PreTrainedModel, path: str) -> tuple[Sources, Sources]:
    """(sources of parameters, sources of buffers in the files); OSError if there are no such files."""
    found = _made(model, stored_in(path))
    names = defaultdict(list)  # all names of a parameter: a tied head is also the embedding
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    parameters = {}
    for parameter, called in names.items():
        held = [found[name] for name in called if name in found]
        if len(held) != 1:
            raise Unlike(f"the files hold {called[0]} {len(held)} times")
        parameters[called[0]] = _as_large_as(parameter, held[0], called[0])
    kept = set(model.state_dict()) - {name for called in names.values() for name in called}
    buffers = {}
    for name in sorted(kept):
        if name not in found:
            raise Unlike(f"the files have no {name}")
        buffers[name] = _as_large_as(model.get_buffer(name), found[name], name)
    return parameters, buffers


def _as_large_as(tensor: torch.Tensor, source: Source, name: str) -> Source:
    if not source.shape or source.shape != tuple(tensor.shape) or not tensor.is_floating_point():
        raise Unlike(f"{name} is {source.shape} in the files")  # scalars have no rows
    return source


def _made(model: transformers.PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, Source]:
    """Sources by the model's names, for parameters and buffers alike."""
    rules = [*get_model_conversion_mapping(model), *_unpacking(model.config)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = model.state_dict()
    targets: dict[str, _Made] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            continue  # transformers skips it too: rotary frequencies in old files, heads of other tasks
        made = targets.setdefault(target, _Made(converter=by_pattern[pattern] if pattern else None))
        made.held[pattern or name].append(stored[name])
    return dict(one for name, made in targets.items() for one in _converted(name, made, model))


def quantised_as(config: transformers.PretrainedConfig) -> str | None:
    """The method by which a model's weights are quantised, as its configuration names it; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(config.get_text_config(), "quantization_config", None)
    if not settings:
        return None
    method = settings.get("quant_method", "bitsandbytes") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def _unpacking(config: transformers.PretrainedConfig) -> Sequence[WeightConverter]:
    """Converters for a quantised model."""
    if quantised_as(config) is None:
        return ()
    return [
        WeightConverter([f"{name}_blocks", f"{name}_scales"], f"{name}$", [Mxfp4Dequantize(None)])
        for name in ("down_proj", "gate_up_proj")
    ]


def _converted(name: str, made: _Made, model: transformers.PreTrainedModel) -> Iterator[tuple[str, Source]]:
    if made.converter is None:
        if len(made.held) != 1:
            raise Unlike(f"the files hold {name} {len(made.held)} times")
        [[source]] = made.held.values()
        yield name, _plain(source)
        return
    held: _Held = dict(made.held)
    for operation in made.converter.operations:
        step = _STEPS.get(type(operation))
        if step is None:
            raise Unlike(f"{name} is made by {operation}, which only transformers knows")
        held = step(operation, held, made.converter, model)
    full = name.replace("*.", "0.")
    for target, [source] in held.items():
        # As transformers finds prefix and suffix around the replaced pattern.
        first = next((pattern for pattern in held if pattern in full), None)
        prefix, _, suffix = full.partition(first) if first else ("", "", "")
        yield (prefix + target + suffix) if first else target, source


def _plain(source: Source) -> Source:
    if isinstance(source, Stored) and source.dtype not in _NUMBERS:
        raise Unlike(f"{source.name} is {source.dtype} in the files")
    return source


def _merge(operation: Any, held: _Held, rule: WeightConverter, _model: object) -> _Held:
    """Stack many tensors along a new dimension."""
    if len(held) == 1 and len(rule.target_patterns) != 1:
        raise Unlike(f"{rule} has no single target")
    return {
        rule.target_patterns[0] if len(held) == 1 else pattern: [_stacked(parts, operation.dim)]
        for pattern, parts in held.items()
    }


def _stacked(parts: Sequence[Source], dim: int) -> Stacked:
    plain = [_plain(part) for part in parts]
    if len({part.shape for part in plain}) != 1:
        raise Unlike("the files have experts of several shapes")
    return Stacked(parts=plain, dim=dim)


def _concatenate(operation: Any, held: _Held, rule: WeightConverter, _model: object) -> _Held:
    """Concatenate in the order of the patterns."""
    parts = [_plain(part) for pattern in rule.source_patterns for part in held.get(pattern, ())]
    if not parts or len(held) != len(rule.source_patterns) or len(rule.target_patterns) != 1:
        raise Unlike(f"the files lack a part of {rule.target_patterns[0]}")
    if len({(*part.shape[: operation.dim], *part.shape[operation.dim + 1 :]) for part in parts}) != 1:
        raise Unlike(f"the parts of {rule.target_patterns[0]} have several shapes")
    return {rule.target_patterns[0]: [Joined(parts=parts, dim=operation.dim)]}


def _chunk(operation: Any, held: _Held, rule: WeightConverter, model: transformers.PreTrainedModel) -> _Held:
    """Equal parts, cut like torch.chunk."""
    [[whole]] = held.values()
    targets = operation.get_target_patterns(rule.target_patterns, config=model.config)
    length, dim = _plain(whole).shape[operation.dim], operation.dim
    if length % len(targets):
        raise Unlike(f"{rule.source_patterns[0]} has no {len(targets)} equal parts")
    each = length // len(targets)
    return {target: [Cut(of=whole, dim=dim, begin=i * each, length=each)] for i, target in enumerate(targets)}


def _unpack(_operation: object, held: _Held, rule: WeightConverter, _model: object) -> _Held:
    blocks, scales = (held.get(pattern, ()) for pattern in rule.source_patterns)
    if len(blocks) != 1 or len(scales) != 1 or blocks[0].shape[:-1] != scales[0].shape:
        raise Unlike(f"the files lack blocks or scales of {rule.target_patterns[0]}")
    return {rule.target_patterns[0]: [Unpacked(blocks=blocks[0], scales=scales[0])]}


_Step = Callable[[Any, _Held, WeightConverter, Any], _Held]
_STEPS: Mapping[type[ConversionOps], _Step] = {
    MergeModulelist: _merge,
    Concatenate: _concatenate,
    Chunk: _chunk,
    Mxfp4Dequantize: _unpack,
}


def stored_in(path: str) -> dict[str, Stored]:
    """All tensors in a model's files."""
    found = {}
    for file_path in weight_files(path):
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(name)
                shape = tuple(piece.get_shape())
                found[name] = Stored(path=file_path, name=name, dtype=piece.get_dtype(), shape=shape)
    return found


def weight_files(path: str) -> Sequence[Path]:
    """The safetensors files in the folder or the hub's cache; OSError if there are none."""
    try:
        return [_file(path, SAFE_WEIGHTS_NAME)]
    except OSError:
        index = json.loads(_file(path, SAFE_WEIGHTS_INDEX_NAME).read_bytes())
        return [_file(path, name) for name in sorted(set(index["weight_map"].values()))]


def _file(path: str, name: str) -> Path:
    found = cached_file(path, name)
    assert found is not None, "what is not there is an OSError"
    return Path(found)
