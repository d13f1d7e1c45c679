"""The files of a model as a hub has them, written while its tensors come, one after another.

    take(parameter) ─► all of its group there? ─► transformers' own rules backwards ─► each tensor to its place on disk

A stack of experts becomes a tensor for each, by the names that `from_pretrained` and vLLM know. Places are known before
the first tensor comes, from the model on `meta`: nothing waits in memory but a group, which is a single parameter
almost always. The bytes are those of `save_pretrained`. Blocks on the disk.
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from streamrl.files import naming
from streamrl.learner.parallel.dtensors import kept_in

_FILES = "model{suffix}.safetensors"
_MAX_FILE_BYTES = 5 * 10**9  # as hubs have them; what is larger than the host's memory may not be mapped
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ORDER = tuple(_NAMES.values())  # within a file
_PART_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    file: int  # its descriptor
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class HubFiles:
    """Of one model; entered, given all that it consists of, and left."""

    def __init__(self, folder: Path, model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
        """`model`: on `meta`, and nobody else's from now on; it gives configuration, names and shapes."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if hasattr(model.config, "quantization_config"):  # what will be written is not
            del model.config.quantization_config
        model.save_pretrained(folder, state_dict={})  # configurations alone
        self._folder, self._rules, known = folder, _rules(model), cast(Any, model)
        self._model = known
        known._weight_conversions = self._rules  # else they are looked up for each group
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        own.update((name, tensor.to("meta")) for name, tensor in kept_in(model))
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
        """On the host, whole, and in the dtype that is written."""
        assert name in self._groups, f"{name} is in the trained model, and not in the original one"
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
        """Files with their headers, and where in them each tensor belongs."""
        split = split_torch_state_dict_into_shards(
            self._unwritten, filename_pattern=_FILES, max_shard_size=_MAX_FILE_BYTES
        )
        for file_name, names in split.filename_to_tensors.items():
            file = os.open(self._folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._stack.callback(os.close, file)
            layout: dict[str, object] = {"__metadata__": {"format": "pt"}}
            end, ends = 0, []
            for name in sorted(names, key=self._by_width):
                tensor = self._unwritten[name]
                begin, end = end, end + tensor.nbytes
                offsets = [begin, end]
                layout[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
                ends.append((name, begin, tensor))
            header = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
            header += b" " * (-len(header) % 8)
            _write_at(file, memoryview(len(header).to_bytes(8, "little") + header), 0)
            for name, begin, tensor in ends:
                at = 8 + len(header) + begin
                yield name, _Place(file=file, at=at, dtype=tensor.dtype, shape=tuple(tensor.shape))
        if split.is_sharded:
            told = {"total_parameters": self._model.num_parameters(), **split.metadata}
            index = {"metadata": told, "weight_map": split.tensor_to_filename}
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
    """A disk that fills up takes a part of it, and says why only when it is asked for the rest."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _rules(model: transformers.PreTrainedModel) -> Sequence[WeightTransform]:
    """Those that `save_pretrained` reverts of a model that was not loaded: a prefix is nowhere that was not seen."""
    rules = get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in rules if not isinstance(rule, PrefixChange)]


def _groups(names: Mapping[str, object], rules: Sequence[WeightTransform]) -> dict[str, str]:
    """Of each of these names, the first that it becomes in the files: equal ones are reverted together."""
    backwards = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in backwards if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]
    return {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}
