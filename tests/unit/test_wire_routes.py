"""Routes on the wire: what comes out is what went in, or one WireError; and not a byte where there are none."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WireError
from streamrl.protocol.wire import routes as wire
from streamrl.protocol.wire.group import Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.routes import MAX_ROUTE_BYTES, RouteShape, all_missing, dtype_for, ending, is_missing
from tests.helpers import make_group, make_sample, make_ticket

NUM_PROMPT = 3  # of a made-up ticket


def random_routes(num_tokens: int, shape: RouteShape, *, seed: int = 0) -> wire.Routes:
    size = (num_tokens, shape.num_layers, shape.num_chosen)
    return np.random.default_rng(seed).integers(0, shape.num_experts, size).astype(dtype_for(shape.num_experts))


def routed_group(lengths: list[int], shape: RouteShape) -> Group:
    """Each answer's last token has no route."""
    samples = []
    for at, length in enumerate(lengths):
        made = random_routes(max(0, length - 1), shape, seed=1 + at)
        samples.append(make_sample(num_tokens=length, routes=ending(made) if length else None))
    return replace(
        make_group(make_ticket(5), samples=tuple(samples)), prompt_routes=random_routes(NUM_PROMPT, shape, seed=99)
    )


SHAPES = st.builds(
    RouteShape,
    num_layers=st.integers(1, 4),
    num_chosen=st.integers(1, 3),
    num_experts=st.sampled_from([1, 4, 255, 256, 257, 30_000]),
)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), shape=SHAPES)
def test_routes_come_out_as_they_went_in(lengths: list[int], shape: RouteShape) -> None:
    group = routed_group(lengths, shape)
    header, body = encode_group(group)
    back = decode_body(decode_header(header), body, routes=shape)

    assert back.prompt_routes is not None
    np.testing.assert_array_equal(back.prompt_routes, group.prompt_routes)
    for found, told in zip(back.samples, group.samples, strict=True):
        assert found.routes is not None
        expected = all_missing(0, back.prompt_routes) if told.routes is None else told.routes
        np.testing.assert_array_equal(found.routes, expected)
        assert found.routes.dtype == dtype_for(shape.num_experts)
        assert is_missing(found.routes).tolist() == [False] * (len(found.routes) - 1) + [True] * bool(len(found.routes))
        assert found.token_ids.tolist() == told.token_ids.tolist()


def test_a_group_without_routes_says_so() -> None:
    header, _ = encode_group(make_group(make_ticket(5)))
    assert msgpack.unpackb(header)["routes"] is None
    assert decode_header(header).routes is None


def test_ids_take_little_more_than_their_entropy() -> None:
    """Of 128 experts 7 bits each; where there are more than a byte can say, the high bytes cost next to nothing."""
    for experts, most in ((128, 0.9), (256, 1.02)):
        shape = RouteShape(num_layers=48, num_chosen=8, num_experts=experts)
        header, _ = encode_group(routed_group([400, 400], shape))
        counts = decode_header(header).routes
        assert counts is not None
        assert counts.num_bytes < most * (NUM_PROMPT + 800) * 48 * 8


def test_a_prompt_that_no_sample_went_on_behind_has_missing_routes() -> None:
    group = replace(routed_group([4], RouteShape(2, 2, 4)), prompt_routes=None)
    header, body = encode_group(group)
    found = decode_body(decode_header(header), body).prompt_routes
    assert found is not None
    assert is_missing(found).all()


def test_samples_of_which_some_have_no_routes_are_no_group() -> None:
    group = routed_group([4, 4], RouteShape(2, 2, 4))
    with pytest.raises(WireError, match="no routes"):
        encode_group(replace(group, samples=(group.samples[0], group.samples[1]._replace(routes=None))))
    other = group.samples[1]._replace(routes=random_routes(4, RouteShape(3, 2, 4)))
    with pytest.raises(WireError, match="routes of a different shape"):
        encode_group(replace(group, samples=(group.samples[0], other)))


def test_more_routes_than_a_message_may_have_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = routed_group([4, 4], RouteShape(2, 2, 4))
    monkeypatch.setattr(wire, "MAX_ROUTE_BYTES", 43)
    with pytest.raises(WireError, match=r"routes of 44 bytes .* limit is 43: .*sampling\.num_samples"):
        encode_group(group)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (RouteShape(3, 2, 4), "2 layers and 2 experts a token; the model has 3 and 2"),
        (RouteShape(2, 1, 4), "2 layers and 2 experts a token; the model has 2 and 1"),
        (RouteShape(2, 2, 3), "a route to expert 3, but the model has 3"),
    ],
)
def test_routes_of_another_model_are_refused(shape: RouteShape, words: str) -> None:
    header, body = encode_group(routed_group([9, 9], RouteShape(2, 2, 4)))
    decode_body(decode_header(header), body, routes=RouteShape(2, 2, 4))
    with pytest.raises(WireError, match=words):
        decode_body(decode_header(header), body, routes=shape)


HEADER, BODY = encode_group(routed_group([4, 5], RouteShape(2, 2, 300)))
FRAME = decode_header(HEADER).routes
assert FRAME is not None
NUMBERS = [0, 1, 2, 3, 4, -1, 255, 256, 1 << 20, 1 << 28, 1 << 40, 1 << 63]


def read(body: bytes, **changes: Any) -> Group:
    """Under a digest that is right."""
    told = {**msgpack.unpackb(HEADER), "digest": xxhash.xxh3_64_intdigest(body), **changes}
    return decode_body(decode_header(msgpack.packb(told)), body)


@given(numbers=st.lists(st.sampled_from(NUMBERS), max_size=5), cut=st.integers(0, FRAME.num_bytes))
def test_counts_that_lie_give_the_one_error(numbers: list[int], cut: int) -> None:
    with contextlib.suppress(WireError):
        read(BODY[: len(BODY) - cut], routes=numbers)
    with contextlib.suppress(WireError):
        read(BODY[: len(BODY) - cut], routes=[*numbers, *FRAME][-4:])


@given(place=st.integers(0, FRAME.num_bytes - 1), value=st.integers(0, 255))
def test_bytes_that_were_changed_give_routes_or_the_one_error(place: int, value: int) -> None:
    at = len(BODY) - FRAME.num_bytes + place
    with contextlib.suppress(WireError):
        read(BODY[:at] + bytes([value]) + BODY[at + 1 :])


def test_a_frame_that_claims_to_be_huge_is_refused_unread() -> None:
    for frame in (
        zstandard.ZstdCompressor().compress(bytes(1 << 20)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(96)),
    ):
        body = BODY[: -FRAME.num_bytes] + frame
        with pytest.raises(WireError, match="claim"):
            read(body, routes=[len(frame), *FRAME[1:]])
    with pytest.raises(WireError, match=f"limit is {MAX_ROUTE_BYTES}"):
        wire.take_routes(FRAME._replace(num_layers=1024, num_chosen=256), memoryview(b""), 3, [400, 500], None)
