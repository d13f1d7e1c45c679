"""The experts that the engine's routers chose: [tokens, layers, experts a token] of a group's prompt and samples.

A token's route is known once the engine has processed the token, so the last token of an answer has none unless
something follows it: it is MISSING, and the learner routes it itself. Layers without experts hold zeros. An id takes
one byte for up to 255 experts, else two; the largest number that fits marks a missing route.

    a body     ... its message | one zstd frame: the low bytes of all ids, then the high ones where they have any
    its header routes: [bytes of that frame, layers, experts a token, bytes an id]

The ids are those of the prompt's tokens, once per group, then of all samples' tokens, end to end. A group without
routes has nil instead. Routes can be large: a model of 48 layers and 8 experts a token has 384 ids per token, where
token id and logprob take 8 bytes. So they have a size limit of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from streamrl.errors import WireError

Routes: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]  # [T, layers, experts a token] of one byte or two
MAX_ROUTE_BYTES = 256 << 20  # per group, uncompressed
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_MAX_LAYERS, _MAX_CHOSEN = 1024, 256


class RouteCounts(NamedTuple):
    """The header's description of a group's routes."""

    num_bytes: int  # at the end of the body
    num_layers: int
    num_chosen: int  # experts a token
    id_bytes: int

    def plain_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.num_layers * self.num_chosen * self.id_bytes


class Routed(NamedTuple):
    """The routes of a group."""

    of_prompt: Routes | None
    of_samples: list[Routes | None]


class RouteShape(NamedTuple):
    """The shape of a model's routes."""

    num_layers: int  # including layers without experts
    num_chosen: int
    num_experts: int

    def plain_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.num_layers * self.num_chosen * dtype_for(self.num_experts).itemsize


def dtype_for(num_experts: int) -> np.dtype[Any]:
    return _DTYPES[1 if num_experts <= np.iinfo(np.uint8).max else 2]


def missing_in(routes: Routes) -> int:
    return int(np.iinfo(routes.dtype).max)


def is_missing(routes: Routes) -> npt.NDArray[np.bool_]:  # [T]
    found: npt.NDArray[np.bool_] = (routes == missing_in(routes)).any(axis=(1, 2))
    return found


def all_missing(num_tokens: int, like: Routes) -> Routes:
    return np.full((num_tokens, *like.shape[1:]), missing_in(like), dtype=like.dtype)


def ending(routes: Routes) -> Routes:
    """Append a missing route for the last token."""
    return np.concatenate([routes, all_missing(1, routes)])


def joined(prompt: Routes | None, sample: Routes | None) -> Routes | None:
    return None if prompt is None or sample is None else np.concatenate([prompt, sample])


def pack_routes(
    prompt: Routes | None, samples: Sequence[Routes | None], num_prompt: int, lengths: Sequence[int]
) -> tuple[RouteCounts | None, bytes]:
    """Return the header's counts and the compressed routes of a group in which all samples have routes, or none.

    A prompt that no sample continues has missing routes.
    """
    routed = [each for each in samples if each is not None]
    if not routed:
        return None, b""
    parts = [all_missing(num_prompt, routed[0]) if prompt is None else prompt, *routed]
    if sum(map(len, parts)) != num_prompt + sum(lengths) or len({(each.shape[1:], each.dtype) for each in parts}) != 1:
        raise WireError("some of a group's tokens have no routes, or routes of a different shape")
    whole = np.concatenate(parts)
    if whole.nbytes > MAX_ROUTE_BYTES:
        raise WireError(f"routes of {whole.nbytes} bytes in a group; the limit is {MAX_ROUTE_BYTES}: {REMEDY}")
    planes = whole.astype(_DTYPES[whole.itemsize], copy=False).view(np.uint8).reshape(-1, whole.itemsize)
    frame = zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(planes.T).data)
    return RouteCounts(len(frame), whole.shape[1], whole.shape[2], whole.itemsize), frame


REMEDY = "make sampling.num_samples or sampling.max_tokens smaller, or set algorithm.routing_replay=none"


def check_counts(counts: RouteCounts) -> None:
    """Check a header's counts, as far as possible without the body."""
    if counts.id_bytes not in _DTYPES or not (0 < counts.num_layers <= _MAX_LAYERS):
        raise WireError(f"routes of {counts.num_layers} layers and {counts.id_bytes} bytes an id are not possible")
    if not 0 < counts.num_chosen <= _MAX_CHOSEN or not 0 < counts.num_bytes <= MAX_ROUTE_BYTES:
        raise WireError(f"routes of {counts.num_bytes} bytes, {counts.num_chosen} experts a token are not possible")


def take_routes(
    counts: RouteCounts | None, frame: memoryview, num_prompt: int, lengths: Sequence[int], shape: RouteShape | None
) -> Routed:
    """Decode routes and check them against `shape`, if known: a route to a missing expert would crash the learner's
    step.
    """
    if counts is None:
        return Routed(None, [None] * len(lengths))
    num_tokens = num_prompt + sum(lengths)
    size = counts.plain_bytes(num_tokens)
    if not 0 < size <= MAX_ROUTE_BYTES:
        raise WireError(f"routes of {size} bytes in a group; the limit is {MAX_ROUTE_BYTES}")
    planes = np.frombuffer(_expand(frame, size), np.uint8).reshape(counts.id_bytes, -1)
    whole: Routes = np.ascontiguousarray(planes.T).view(_DTYPES[counts.id_bytes])
    whole = whole.reshape(num_tokens, counts.num_layers, counts.num_chosen)
    if shape is not None:
        _check(whole, shape)
    cuts = pairwise(accumulate(lengths, initial=num_prompt))
    return Routed(whole[:num_prompt], [whole[start:end] for start, end in cuts])


def _expand(frame: memoryview, size: int) -> bytes:
    """Decompress, after checking that the size is what the tokens need."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != size:
            raise WireError(f"routes claim to be {declared} bytes, expected {size}")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"routes do not decompress: {error}") from None
    if len(plain) != size:
        raise WireError(f"routes are {len(plain)} bytes, expected {size}")
    return plain


def _check(routes: Routes, shape: RouteShape) -> None:
    if routes.shape[1:] != (shape.num_layers, shape.num_chosen):
        raise WireError(
            f"routes of {routes.shape[1]} layers and {routes.shape[2]} experts a token; the model has "
            f"{shape.num_layers} and {shape.num_chosen}"
        )
    last = int(routes.max(initial=0, where=routes != missing_in(routes)))
    if last >= shape.num_experts:
        raise WireError(f"a route to expert {last}, but the model has {shape.num_experts}")
