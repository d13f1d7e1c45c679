"""Writes a model's files in the hub's layout while its tensors arrive one by one.

    take(parameter) ─► all of its group there? ─► transformers' rules in reverse ─► each tensor to its place on disk

A stack of experts becomes one tensor per expert, under the names that `from_pretrained` and vLLM know. Positions are
computed beforehand from the model on `meta`, so memory holds only a group, which is almost always a single parameter.
The bytes are those of `save_pretrained`. Blocks on the disk.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from streamrl.files import naming
from streamrl.learner.parallel.dtensors import persistent_buffers
from streamrl.safetensors_header import NAMES, Entry, pack_header

_FILES = "model{suffix}.safetensors"
_MAX_FILE_BYTES = 5 * 10**9  # usual on hubs; files larger than the host's memory may fail to be mapped
_NAMES = {getattr(torch, name): NAMES[name] for name in ("float64", "float32", "bfloat16", "float16")}
_ORDER = tuple(_NAMES.values())  # within a file
_PART_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    file: int  # descriptor
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class HubFiles:
    """The files of one model: a context manager that must be given every tensor of the model."""

    def __init__(self, folder: Path, model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
        """`model` is on `meta` and modified here; it provides configuration, names and shapes."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if hasattr(model.config, "quantization_config"):  # the written weights are not quantized
            del model.config.quantization_config
        self._folder, self._rules, known = folder, _rules(model), cast(Any, model)
        # transformers refuses to write generation defaults that it would warn about, as some releases have them.
        defaults, known.generation_config = known.generation_config, transformers.GenerationConfig()
        model.save_pretrained(folder, state_dict={})  # only configurations
        if defaults is not None:
            defaults.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        self._model = known
        known._weight_conversions = self._rules  # cached; otherwise they are looked up for each group
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        own.update((name, tensor.to("meta")) for name, tensor in persistent_buffers(model))
        self._groups = _groups(own, self._rules)
        self._members = Counter(self._groups.values())
        self._waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self._unwritten = self._as_in_files(own)
        self._places: Mapping[str, _Place] = {}
        self._stack = ExitStack()

    def __enter__(self) -> HubFiles:
        self._places = dict(self._lay_out())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        assert kind is not None or not self._unwritten, f"never given: {min(self._unwritten)}"

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor, on the host and in the dtype to write."""
        assert name in self._groups, f"{name} is in the trained model but not in the original one"
        group = self._groups[name]
        self._waiting[group][name] = tensor
        if len(self._waiting[group]) == self._members[group]:
            for written, part in self._as_in_files(self._waiting.pop(group)).items():
                self._write(written, part)

    def _as_in_files(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self._rules:
            return tensors
        found: dict[str, torch.Tensor] = revert_weight_conversion(self._model, tensors)
        return found

    def _lay_out(self) -> Iterator[tuple[str, _Place]]:
        """Create the files with their headers, and yield each tensor's position."""
        split = split_torch_state_dict_into_shards(
            self._unwritten, filename_pattern=_FILES, max_shard_size=_MAX_FILE_BYTES
        )
        for file_name, names in split.filename_to_tensors.items():
            file = os.open(self._folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._stack.callback(os.close, file)
            layout: dict[str, Entry] = {}
            end = 0
            for name in sorted(names, key=self._by_width):
                tensor = self._unwritten[name]
                begin, end = end, end + tensor.nbytes
                layout[name] = Entry(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), begin=begin, end=end)
            header = pack_header(layout, metadata={"format": "pt"})
            _write_at(file, memoryview(header), 0)
            for name, entry in layout.items():
                dtype = self._unwritten[name].dtype
                yield name, _Place(file=file, at=len(header) + entry.begin, dtype=dtype, shape=entry.shape)
        if split.is_sharded:
            metadata = {"total_parameters": self._model.num_parameters(), **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _by_width(self, name: str) -> tuple[int, str]:
        return _ORDER.index(_NAMES[self._unwritten[name].dtype]), name

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        place = self._places[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), f"{name} is another"
        whole = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        with naming(self._folder):
            for begin in range(0, len(whole), _PART_BYTES):
                _write_at(place.file, whole[begin : begin + _PART_BYTES], place.at + begin)
        del self._unwritten[name]


def _write_at(file: int, data: memoryview, at: int) -> None:
    """Write all of `data`; a disk that fills up writes a part, and only the next call raises."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _rules(model: transformers.PreTrainedModel) -> Sequence[WeightTransform]:
    """The rules that `save_pretrained` reverts for an unloaded model.

    Without prefix changes, which are known only for a model that was loaded.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in rules if not isinstance(rule, PrefixChange)]


def _groups(names: Mapping[str, object], rules: Sequence[WeightTransform]) -> dict[str, str]:
    """Map each name to the first name that it becomes in the files; names with equal values are reverted together."""
    backwards = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in backwards if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]
    return {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}
