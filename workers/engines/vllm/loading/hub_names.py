"""Renames a model's tensors from transformers' in-memory names to those in Hugging Face checkpoint files.

    published: as the learner holds them ─► transformers' rules, reversed ─► one tensor per expert, file names

vLLM's loaders expect the layout of files. Given stacked experts or transformers' internal names, some load the wrong
tensor silently. Slices stay views into the original tensor, so nothing is copied before vLLM copies.
Blocks on reading the model's configuration, at the first use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from streamrl.workers.engines.hf_model import published

Named = tuple[str, torch.Tensor]


class HubNames:
    """The renaming rules of one model."""

    def __init__(self, path: str, *, trust_remote_code: bool) -> None:
        """`path`: a folder or hub name, whose configuration determines the rules."""
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        self._model = model
        rules = _reversed_rules(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        # How many tensors each target in the files is made from.
        self._members = Counter(self._in_files(name)[0] for name in published(model))

    def of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield each renamed tensor as soon as all its parts have arrived."""
        waiting: dict[str, list[Named]] = defaultdict(list)
        for name, tensor in tensors:
            target, pattern = self._in_files(name)
            if pattern is None:
                yield target, tensor
                continue
            waiting[target].append((name, tensor))
            if len(waiting[target]) >= self._members[target]:
                yield from self._converted(target, waiting.pop(target))
        assert not waiting, f"parts are missing of: {min(waiting)}"

    def _in_files(self, name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        return str(target), pattern

    def _converted(self, target: str, parts: Sequence[Named]) -> Iterator[Named]:
        pattern = self._in_files(parts[0][0])[1]
        assert pattern is not None, "tensors without a pattern are only renamed"
        rule: Any = deepcopy(self._by_pattern[pattern])  # a rule stores the tensors added to it
        for name, tensor in parts:
            rule.add_tensor(target, name, self._in_files(name)[1], tensor)
        for made, tensor in rule.convert(target, model=self._model, config=self._model.config).items():
            yield made, tensor[0] if isinstance(tensor, list) else tensor


class _Views(Chunk):
    """Split into equal views, where transformers copies each part."""

    def convert(  # type: ignore[override]  # the base method is wrapped by a decorator
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        [found] = input_dict.values()
        whole = found[0] if isinstance(found, list) else found
        targets = self.get_target_patterns(target_patterns, **kwargs)
        return dict(zip(targets, torch.chunk(whole, len(targets), dim=self.dim), strict=True))


def _reversed_rules(model: Any) -> list[Any]:
    """Return the reversed rules, as `save_pretrained` applies them to a model that was not loaded from files. Prefix
    changes are left out: they apply only to prefixes seen at load."""
    rules = get_model_conversion_mapping(model, add_legacy=False)
    found = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
    for rule in found:
        if isinstance(rule, WeightConverter):
            rule.operations = [_as_view(operation) for operation in rule.operations]
    return found


def _as_view(operation: ConversionOps) -> ConversionOps:
    return _Views(operation.dim, operation.num_shards_attribute) if type(operation) is Chunk else operation
