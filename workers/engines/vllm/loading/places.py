"""Maps checkpoint tensors to their positions in vLLM's live parameters, and writes changed elements there.

    loader calls (`loaders`) ─► does the tensor fill a contiguous range of rows? ─► Place ─► worker (`patches`)
                                           └─ tested by running the loader on numbered elements
    patch file ─► elements, rows, rebuilt layers ─► live parameters and packed copies

Anything uncertain is not written in place: `NoPlace` carries the reason, and full loads continue. That applies to
tensor-parallel and quantised engines, vLLM's own adapters, experts, absorbed projections, and weights that a model
derives at load time. On GPUs parameters are plain, so all places are rows.

An error leaves a half-written version; the engine that raises it is ended (`base`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionImplBase

from streamrl.workers.engines.vllm.loading.hub_names import Named
from streamrl.workers.engines.vllm.loading.linears import LookedUp, in_tiles, packed
from streamrl.workers.engines.vllm.loading.loaders import Call, blank, load_into, loaded_aside, loader_calls
from streamrl.workers.engines.vllm.loading.patches import TILE_ROWS, Kind, Place, read_patch

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # they keep weights as given
_NUMBERS = 251  # a prime, so it divides no width; all values are exact in bfloat16
_PAIR_BYTES = 4
_BITS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32}

Tensors = Mapping[str, torch.Tensor]
InFiles = Callable[[Iterable[Named]], Iterable[Named]]  # renames tensors as in checkpoint files


class NoPlace(Exception):
    """Why nothing may be written in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    module: Any
    name: str  # the parameter's name in the module
    calls: list[Call]

    @property
    def parameter(self) -> torch.Tensor:
        found: torch.Tensor = self.module._parameters[self.name].data
        return found

    def flat(self, kind: Kind) -> torch.Tensor:
        memory = self.parameter if kind == "rows" else packed(self.module)
        assert memory is not None, "a place in tiles belongs to a layer that is packed in tiles"
        return memory.view(-1).view(_BITS[memory.itemsize])


class LivePlaces:
    """The places of one model's parameters; `tensors` are views into one mirror file."""

    def __init__(self, model: Any, tensors: Tensors, *, in_files: InFiles, num_shards: int) -> None:
        if num_shards > 1:
            raise NoPlace("each engine process has only a part of the tensors")
        _refuse_derived_weights(model)
        self._tensors = tensors
        self._live: dict[str, _Live] = {}  # by the engine's parameter name
        self.places: list[Place] = []
        self._rows: dict[tuple[Any, ...], int] = {}  # cached results of `_find_first_row`, one per shape
        by_address = {address: name for name, address in _addresses(tensors.items()).items()}
        written: set[int] = set()  # addresses of live parameters
        for layer, module, of_module in loader_calls(model, in_files(tensors.items())):
            for name, calls in of_module.items():
                live = _Live(module=module, name=name, calls=calls)
                self._live[f"{layer}.{name}"] = live
                for kind in _kinds(f"{layer}.{name}", live, written):
                    self.places += [self._place(f"{layer}.{name}", kind, live, call, by_address) for call in calls]

    def are_of(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Return whether these are the tensors that the places were made from, and not views of another file."""
        return {name: tensor.data_ptr() for name, tensor in tensors} == {
            n: tensor.data_ptr() for n, tensor in self._tensors.items()
        }

    @torch.no_grad()
    def write(self, patch_file: Path, *, since: int) -> None:
        """Apply a patch. `since`: the version the model holds."""
        patch, elements = read_patch(patch_file)
        if patch.since != since:
            raise ValueError(f"a patch of version {patch.since} cannot be applied to version {since}")
        for parameter, kind, index, bits in elements:
            flat = self._live[parameter].flat(kind)
            positions = torch.from_numpy(index).to(flat.device)
            values = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).to(flat.device)
            flat.index_copy_(0, positions, values)
        for place in self.places:
            if place.tensor in patch.whole and place.kind != "layer":
                _write_rows(self._live[place.parameter], place, self._tensors[place.tensor])
        for parameter in patch.layers:  # CPUs only
            _rebuild(self._live[parameter], parameter)

    def _place(self, parameter: str, kind: Kind, live: _Live, call: Call, by_address: Mapping[int, str]) -> Place:
        given = call[0][0]
        name = by_address.get(given.data_ptr(), "")
        if not name or given.shape != self._tensors[name].shape or not given.is_contiguous() or not given.ndim:
            raise NoPlace(f"{parameter} is not loaded from the checkpoint's tensors alone")
        width = given.numel() // len(given)
        row = 0 if kind == "layer" else self._first_row(parameter, live, given, call)
        return Place(tensor=name, parameter=parameter, kind=kind, first_row=row, width=width)

    def _first_row(self, parameter: str, live: _Live, given: torch.Tensor, call: Call) -> int:
        shapes = tuple(other.shape for (other, *_), _ in live.calls)
        arguments = repr((call[0][1:], sorted(call[1].items())))
        key = (type(live.module), live.name, live.parameter.shape, shapes, given.shape, given.dtype, arguments)
        if key not in self._rows:
            self._rows[key] = _find_first_row(parameter, live, given, call)
        return self._rows[key]


def _addresses(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors}


def _refuse_derived_weights(model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            raise NoPlace("the engine applies adapters itself")
        if isinstance(module, Attention) and _derives_nothing(module):
            continue
        if hasattr(module, "process_weights_after_loading"):
            raise NoPlace(f"{name or 'the model'} ({type(module).__name__}) derives further weights when it is loaded")


def _derives_nothing(attention: Attention) -> bool:
    if type(attention) is not Attention:
        return False
    impl: Any = attention.impl
    kernel = type(impl)
    if kernel.__name__ == "FlashInferImpl":  # the first choice on Blackwell, where no GPU has run this
        return impl._sinks_source is None  # it only casts sinks
    return kernel.process_weights_after_loading is AttentionImplBase.process_weights_after_loading


def _kinds(parameter: str, live: _Live, written: set[int]) -> list[Kind]:
    """Return the layouts in which a parameter's weights are stored."""
    module, name = live.module, live.name
    method = getattr(module, "quant_method", None)
    if not (method is None or isinstance(method, _PLAIN)):
        raise NoPlace(f"{parameter} is stored in the layout of {type(method).__name__}")
    is_weight = method is not None and name == "weight"
    found: list[Kind] = []
    if live.parameter.numel():
        if is_weight and live.parameter.ndim != 2:
            raise NoPlace(f"{parameter} is stored in a layout of its own")
        address = live.parameter.data_ptr()
        if address not in written:  # else it shares memory with another parameter, such as a tied head
            written.add(address)
            found.append("rows")
    if is_weight and hasattr(module, "cpu_linear") and not isinstance(method, LookedUp):
        found.append("layer" if packed(module) is None else "tiles")
    elif not live.parameter.numel():
        raise NoPlace(f"{parameter} is stored in a layout of its own")
    return found


def _find_first_row(parameter: str, live: _Live, given: torch.Tensor, call: Call) -> int:
    """Return the first row the loader writes this tensor to; NoPlace unless its rows stay unchanged and adjacent."""
    if live.parameter.dtype != given.dtype or not live.parameter.is_contiguous():
        raise NoPlace(f"{parameter} is stored as {live.parameter.dtype} and not as {given.dtype}, or not contiguously")
    probe = blank(live.module, live.name)
    whole = live.parameter.shape if live.parameter.numel() else getattr(packed(live.module), "shape", None)
    if probe is None or probe.shape != whole or probe.dtype != given.dtype or not probe.is_contiguous():
        raise NoPlace(f"{parameter} is stored in another layout than it is loaded in")
    probe.data.zero_()
    numbers = (torch.arange(given.numel(), dtype=torch.int32) % _NUMBERS + 1).to(given.dtype).view(given.shape)
    load_into(probe, numbers, *call[0][1:], **call[1])
    first = int(probe.data.view(len(probe), -1)[:, 0].ne(0).int().argmax())
    written_rows = probe.data[first : first + len(given)]
    if written_rows.shape != given.shape or not torch.equal(written_rows, numbers):
        raise NoPlace(f"{parameter} does not hold the rows of its tensors unchanged")
    return first


def _write_rows(live: _Live, place: Place, tensor: torch.Tensor) -> None:
    rows = tensor.view(len(tensor), -1)
    if place.kind == "rows":
        target = live.parameter.view(len(live.parameter), -1)
        target[place.first_row : place.first_row + len(rows)].copy_(rows)
        return
    weight = packed(live.module)
    assert weight is not None, "a place in tiles belongs to a layer that is packed in tiles"
    if rows.data_ptr() % _PAIR_BYTES:
        rows = rows.clone()
    at = torch.arange(place.first_row, place.first_row + len(rows))
    in_tiles(weight)[at // TILE_ROWS, at % TILE_ROWS] = rows.view(torch.int32)


def _rebuild(live: _Live, parameter: str) -> None:
    module = live.module
    if not live.parameter.numel():
        weight = loaded_aside(module, live.name, live.calls)
        assert weight is not None, f"{parameter} was loaded before, so its loader is known"
        module.weight = nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


def places_in(model: Any, tensors: Iterable[Named], *, in_files: InFiles, num_shards: int) -> LivePlaces | str:
    """Return the live places, or why there are none."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            return LivePlaces(model, dict(tensors), in_files=in_files, num_shards=num_shards)
    except NoPlace as no_place:
        return str(no_place)
