"""Which experts the engine's routers chose: [tokens, layers, experts a token] of a group's prompt and its samples.

What a token was routed by is known once it was read, so the last token of an answer has no route unless something goes
on behind it: it is MISSING, and the learner routes it by itself. Layers without experts hold zeros. Ids are a byte each
while there are at most 255 experts, else two; the largest number that fits says that a token's route is missing.

    a body     ... its message | one zstd frame: the low bytes of all ids, then the high ones where they have any
    its header routes: [bytes of that frame, layers, experts a token, bytes an id]

The ids are those of the prompt's tokens, once a group, then of all samples' tokens, end to end. A group without them
says so by a nil. They may be many: a model of 48 layers and 8 experts a token has 384 a token,
where its id and log-prob are 8 bytes; so a group's are bounded apart from the rest of its body.
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
MAX_ROUTE_BYTES = 256 << 20  # of a group, as they lie in memory
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_MAX_LAYERS, _MAX_CHOSEN = 1024, 256


class RouteCounts(NamedTuple):
    """What a header says of them."""

    num_bytes: int  # at the end of the body
    num_layers: int
    num_chosen: int  # experts a token
    id_bytes: int

    def plain_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.num_layers * self.num_chosen * self.id_bytes


class Routed(NamedTuple):
    """What a body has."""

    of_prompt: Routes | None
    of_samples: list[Routes | None]


class RouteShape(NamedTuple):
    """What a model's routes are like."""

    num_layers: int  # those without experts count, too
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
    """Of tokens the last of which has none yet."""
    return np.concatenate([routes, all_missing(1, routes)])


def joined(prompt: Routes | None, sample: Routes | None) -> Routes | None:
    return None if prompt is None or sample is None else np.concatenate([prompt, sample])


def pack_routes(
    prompt: Routes | None, samples: Sequence[Routes | None], num_prompt: int, lengths: Sequence[int]
) -> tuple[RouteCounts | None, bytes]:
    """Of a group whose samples all have them, or none: as its header says, and as they lie in its body. A prompt that
    no sample went on behind has none."""
    routed = [each for each in samples if each is not None]
    if not routed:
        return None, b""
    told = [all_missing(num_prompt, routed[0]) if prompt is None else prompt, *routed]
    if sum(map(len, told)) != num_prompt + sum(lengths) or len({(each.shape[1:], each.dtype) for each in told}) != 1:
        raise WireError("some of a group's tokens have no routes, or routes of another model")
    whole = np.concatenate(told)
    if whole.nbytes > MAX_ROUTE_BYTES:
        raise WireError(f"routes of {whole.nbytes} bytes in a group; the limit is {MAX_ROUTE_BYTES}: {REMEDY}")
    planes = whole.astype(_DTYPES[whole.itemsize], copy=False).view(np.uint8).reshape(-1, whole.itemsize)
    frame = zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(planes.T).data)
    return RouteCounts(len(frame), whole.shape[1], whole.shape[2], whole.itemsize), frame


REMEDY = "make sampling.num_samples or sampling.max_tokens smaller, or set algorithm.routing_replay=none"


def check_counts(counts: RouteCounts) -> None:
    """As a header has them, as far as it can be."""
    if counts.id_bytes not in _DTYPES or not (0 < counts.num_layers <= _MAX_LAYERS):
        raise WireError(f"routes of {counts.num_layers} layers and {counts.id_bytes} bytes an id are not possible")
    if not 0 < counts.num_chosen <= _MAX_CHOSEN or not 0 < counts.num_bytes <= MAX_ROUTE_BYTES:
        raise WireError(f"routes of {counts.num_bytes} bytes, {counts.num_chosen} experts a token are not possible")


def take_routes(
    counts: RouteCounts | None, frame: memoryview, num_prompt: int, lengths: Sequence[int], shape: RouteShape | None
) -> Routed:
    """Held to `shape` where it is known: a route to an expert that is not there would end the learner's step."""
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
    """Having checked that no more is built than the tokens need."""
    try:
        told = zstandard.frame_content_size(frame)
        if told != size:
            raise WireError(f"routes claim to be {told} bytes, expected {size}")
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
        raise WireError(f"a route to expert {last}, and the model has {shape.num_experts}")
