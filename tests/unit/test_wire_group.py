"""Groups on the wire: what comes out is what went in, or one WireError."""

from __future__ import annotations

import contextlib
import tracemalloc
from itertools import groupby, pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_BRANCHES, MAX_KEPT_TOKENS, Branch
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, SCHEMA, pack
from streamrl.protocol.wire.group import MAX_HEADER_BYTES, Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from tests.helpers import make_group, make_sample, make_ticket

REWARDS = st.floats(-1e6, 1e6)


@st.composite
def samples(draw: st.DrawFn, *, turns_earn: bool) -> Sample:
    lengths = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=5))  # (given, sampled)
    total = sum(map(sum, lengths))
    ends = np.cumsum([given + sampled for given, sampled in lengths]).tolist()
    spans = tuple(
        Span(version=draw(st.integers(0, 2**63)), step=draw(st.integers(0, 2**40)), start=end - sampled, end=end)
        for (_, sampled), end in zip(lengths, ends, strict=True)
    )
    cut = draw(st.integers(0, total))
    branches, before = [], [3 + (ends[0] if ends else 0)]  # tokens of each row
    for row, (start, end) in enumerate(pairwise(ends)):  # a row for each span
        left = draw(st.integers(0, row))
        branches.append(Branch(start=start, row=left, keep=draw(st.integers(1, before[left]))))
        before.append(branches[-1].keep + end - start)
    branches = branches if draw(st.booleans()) else []
    mask = [at < cut and any(span.start <= at < span.end for span in spans) for at in range(total)]
    made = Sample(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total)), np.int32),
        logprobs=np.array(draw(st.lists(st.floats(-100, 0, width=32), min_size=total, max_size=total)), np.float32),
        mask_runs=runs_of(mask),
        spans=spans,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        rewards=draw(st.dictionaries(st.text(max_size=10), REWARDS, max_size=4)),
        reward=draw(REWARDS),
        branches=tuple(branches),
    )
    return made._replace(turn_rewards=tuple(draw(REWARDS) for _ in made.turns())) if turns_earn else made


def runs_of(mask: list[bool]) -> tuple[int, ...]:
    runs = [len(list(run)) for _, run in groupby(mask)]
    return (0, *runs) if mask and not mask[0] else tuple(runs)


def groups_of_samples() -> st.SearchStrategy[list[Sample]]:
    return st.booleans().flatmap(lambda turns_earn: st.lists(samples(turns_earn=turns_earn), min_size=1, max_size=4))


def as_plain(sample: Sample) -> dict[str, Any]:
    plain = {name: getattr(sample, name) for name in Sample._fields}
    return {**plain, "token_ids": sample.token_ids.tolist(), "logprobs": sample.logprobs.tolist()}


def decode(header: bytes, body: bytes) -> Group:
    return decode_body(decode_header(header), body)


@given(groups_of_samples())
def test_a_group_survives_the_wire(made: list[Sample]) -> None:
    group = decode(*encode_group(make_group(make_ticket(5), samples=tuple(made), generate_s=1.5)))
    assert [as_plain(sample) for sample in group.samples] == [as_plain(sample) for sample in made]
    header = group.header
    versions = [span.version for sample in made for span in sample.spans]
    assert (header.ticket, header.run_uid, header.purpose, header.generate_s) == (5, "uid", "train", 1.5)
    assert header.sample_lengths == tuple(len(sample.token_ids) for sample in made)
    kept = sum(branch.keep for sample in made for branch in sample.branches)
    assert header.num_tokens == sum(header.sample_lengths) + 3 * len(made) + kept
    assert (header.min_version, header.max_version) == (min(versions, default=0), max(versions, default=0))
    assert not header.failed


def test_the_loss_mask_alternates_from_trained() -> None:
    sample = make_sample(num_tokens=6, mask_runs=(2, 3, 1))
    assert sample.loss_mask().tolist() == [True, True, False, False, False, True]


def test_a_failed_ticket_says_why_and_has_no_samples() -> None:
    header, body = encode_group(make_group(make_ticket(5), samples=(), error="no score\n" * 1000))
    decoded = decode_header(header)
    assert decoded.failed
    assert decoded.error.startswith("no score")
    assert decode_body(decoded, body).samples == ()


@pytest.mark.parametrize("group", [{"samples": ()}, {"error": "failed"}], ids=["neither", "both"])
def test_a_group_has_samples_or_an_error(group: dict[str, Any]) -> None:
    header, _ = encode_group(make_group(make_ticket(5), **group))
    with pytest.raises(WireError, match="samples or an error"):
        decode_header(header)


BAD_SAMPLES: dict[str, Sample] = {
    "a log-prob above 0": make_sample(logprobs=np.full(4, 0.5, np.float32)),
    "a log-prob that is NaN": make_sample(logprobs=np.full(4, np.nan, np.float32)),
    "a log-prob that is -inf": make_sample(logprobs=np.full(4, -np.inf, np.float32)),
    "a negative token": make_sample(token_ids=np.full(4, -1, np.int32)),
    "fewer log-probs than tokens": make_sample(logprobs=np.zeros(3, np.float32)),
    "a mask that is too short": make_sample(mask_runs=(3,)),
    "a mask that is too long": make_sample(mask_runs=(4, 2**31)),
    "no spans": make_sample(spans=()),
    "spans with a gap": make_sample(
        spans=(Span(version=1, step=0, start=0, end=1), Span(version=1, step=0, start=2, end=4))
    ),
    "spans that overlap": make_sample(
        spans=(Span(version=1, step=0, start=0, end=3), Span(version=1, step=0, start=2, end=4))
    ),
    "an empty span": make_sample(
        spans=(Span(version=1, step=0, start=0, end=0), Span(version=1, step=0, start=0, end=4))
    ),
    "an empty span of no tokens": make_sample(num_tokens=0, spans=(Span(version=1, step=0, start=0, end=0),)),
    "spans beyond the end": make_sample(spans=(Span(version=1, step=0, start=0, end=5),)),
    "a reward that is NaN": make_sample(reward=float("nan")),
    "a source's reward that is NaN": make_sample()._replace(rewards={"exact": float("nan")}),
    "too many sources": make_sample()._replace(rewards={str(n): 1.0 for n in range(33)}),
    "an unknown finish reason": make_sample(finish_reason="tired"),
    "a branch that keeps more than there is": make_sample(branches=(Branch(start=2, row=0, keep=6),)),
    "a branch that leaves itself": make_sample(branches=(Branch(start=2, row=1, keep=1),)),
    "a branch without tokens": make_sample(branches=(Branch(start=4, row=0, keep=1),)),
    "branches that go back": make_sample(branches=(Branch(start=2, row=0, keep=1), Branch(start=1, row=0, keep=1))),
    "a span that goes on in another row": make_sample(branches=(Branch(start=2, row=0, keep=3),)),
    "a token that was sampled behind nothing": make_sample(
        spans=(Span(version=1, step=0, start=0, end=2), Span(version=1, step=0, start=2, end=4)),
        branches=(Branch(start=2, row=0, keep=0),),
    ),
    "too many branches": make_sample(
        num_tokens=257, spans=(), mask_runs=(0, 257), branches=tuple(Branch(start=n, row=0, keep=1) for n in range(257))
    ),
}


@pytest.mark.parametrize("sample", BAD_SAMPLES.values(), ids=BAD_SAMPLES.keys())
def test_a_sample_that_breaks_the_schema_is_one_wire_error(sample: Sample) -> None:
    with pytest.raises(WireError):
        decode(*encode_group(make_group(make_ticket(0), samples=(sample, make_sample()))))


@pytest.mark.parametrize("rewards", [((0.5,), ()), ((0.5, 0.5), (0.5,)), ((0.5,), (float("nan"),))], ids=str)
def test_either_all_turns_have_a_reward_or_none(rewards: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(WireError):
        decode(*encode_group(make_group(make_ticket(0), samples=tuple(make_sample(turn_rewards=r) for r in rewards))))


def test_a_body_of_another_header_is_refused() -> None:
    header, _ = encode_group(make_group(make_ticket(0)))
    _, other = encode_group(make_group(make_ticket(0), samples=(make_sample(num_tokens=5),) * 2))
    with pytest.raises(WireError, match="does not match its digest"):
        decode(header, other)


def forged(body: bytes, **changes: Any) -> bytes:
    """A header whose digest is right and whose claims are not: only the counts can tell."""
    header, _ = encode_group(make_group(make_ticket(0)))
    fields = msgpack.unpackb(header)
    return pack({**fields, "digest": xxhash.xxh3_64_intdigest(body), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_lengths": [4]},
        {"sample_lengths": [4, 4, 4], "sample_rewards": [0.0] * 3, "sample_finished": [True] * 3},
        {"sample_lengths": [4, 5]},
        {"sample_lengths": [4, -4]},
        {"sample_lengths": [4, True]},
        {"sample_lengths": [4, 1 << 30]},
        {"sample_rewards": [0.0, 2.0]},
        {"sample_rewards": [0.0, float("nan")]},
        {"sample_rewards": [0.0]},
        {"sample_finished": [True, False]},
        {"sample_finished": [1, 0]},
        {"num_prompt_tokens": 4},
        {"num_kept_tokens": 3},
        {"purpose": "war"},
        {"num_failed_samples": -1},
        {"generate_s": float("inf")},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_header_that_lies_about_its_body_is_one_wire_error(changes: dict[str, Any]) -> None:
    _, body = encode_group(make_group(make_ticket(0)))
    assert decode(forged(body), body).header.ticket == 0
    with pytest.raises(WireError):
        decode(forged(body, **changes), body)


def test_a_header_of_another_schema_is_refused_with_both_numbers() -> None:
    fields = msgpack.unpackb(encode_group(make_group(make_ticket(0)))[0])
    for other in ({**fields, "schema": SCHEMA - 1}, {"schema": SCHEMA + 1, "anything": [1]}):
        with pytest.raises(WireError, match=f"schema {other['schema']}; this program uses schema {SCHEMA}: update"):
            decode_header(msgpack.packb(other))


def test_each_field_of_a_header_is_needed_once() -> None:
    header, _ = encode_group(make_group(make_ticket(0)))
    fields = msgpack.unpackb(header)
    for name in fields:
        with pytest.raises(WireError, match="missing"):
            decode_header(msgpack.packb({key: value for key, value in fields.items() if key != name}))
    twice = (b"\xde\x00" + bytes([1 + len(fields)])) + header[3:] + msgpack.packb("ticket") + msgpack.packb(0)
    with pytest.raises(WireError, match="twice"):
        decode_header(twice)


@pytest.mark.parametrize("place", range(7))
def test_a_list_in_a_row_that_lies_about_its_size_costs_no_memory(place: int) -> None:
    """Each of what a row has, and the row itself."""
    lie = b"\xdd\xff\xff\xff\xff"
    row = [msgpack.packb(part) for part in ([4], [[1, 0, 0, 4]], "stop", {}, 0.0, [], [])]
    _, body = encode_group(make_group(make_ticket(0)))
    raw = body[: 4 * 3 + 8 * 8]
    tracemalloc.start()
    try:
        for bomb in (lie, lie + b"\x01" * 1000, b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
            parts = (b"\x91\x97", *row[:place], bomb, *row[place + 1 :])
            message = b"\x84\xa6schema" + bytes([SCHEMA]) + b"\xa4rows" + b"".join(parts)
            with pytest.raises(WireError, match="not a message"):
                decode(forged(raw + message), raw + message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    made = make_sample(reward=np.float64(0.5), mask_runs=(np.int64(4),))._replace(rewards={"exact": np.float32(0.5)})
    [sample] = decode(*encode_group(make_group(make_ticket(0), samples=(made,)))).samples
    assert (sample.reward, sample.rewards, sample.mask_runs) == (0.5, {"exact": 0.5}, (4,))


def test_a_header_over_its_limit_is_refused() -> None:
    with pytest.raises(WireError, match="exceeds the limit"):
        decode_header(bytes(MAX_HEADER_BYTES + 1))


@given(st.binary(max_size=200))
def test_hostile_bodies_with_the_right_digest_are_one_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(forged(body), body)


@given(st.integers(0), st.integers(0, 255), st.booleans())
def test_one_byte_changed_gives_a_group_or_one_wire_error(place: int, byte: int, in_header: bool) -> None:
    header, body = (bytearray(part) for part in encode_group(make_group(make_ticket(0))))
    part = header if in_header else body
    part[place % len(part)] = byte
    with contextlib.suppress(WireError):
        decode(bytes(header), bytes(body))
    if not in_header:  # past the digest, too
        with contextlib.suppress(WireError):
            decode(forged(bytes(body)), bytes(body))


def test_what_a_teacher_gave_comes_out_as_it_went_in_and_costs_nothing_where_there_is_none() -> None:
    plain = [make_sample(num_tokens=num) for num in (3, 0, 5)]
    taught = [one._replace(teacher_logprobs=-np.arange(len(one.token_ids), dtype=np.float32)) for one in plain]

    def travelled(given: list[Sample]) -> Group:
        header, body = encode_group(make_group(make_ticket(1), samples=tuple(given)))
        return decode_body(decode_header(header), body)

    assert [one.teacher_logprobs for one in travelled(plain).samples] == [None] * 3
    told = [one.teacher_logprobs for one in travelled(taught).samples]
    assert [each.tolist() for each in told if each is not None] == [[0, -1, -2], [], [0, -1, -2, -3, -4]]
    for wrong in (np.zeros(2, np.float32), np.full(3, np.nan, np.float32)):
        with pytest.raises(WireError, match="log-prob"):
            travelled([taught[0]._replace(teacher_logprobs=wrong), *taught[1:]])


LONG = MAX_MESSAGE_BYTES // 64  # tokens of a sample, 64 of which fill a body with their ids alone
BESIDE_TOKENS = {"teacher_logprobs": -np.ones(LONG, np.float32), "token_rewards": np.ones(LONG, np.float32)}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([make_sample(branches=(Branch(start=1, row=0, keep=1 + MAX_KEPT_TOKENS),))], "num_kept_tokens"),
        ([make_sample(branches=(Branch(start=1, row=0, keep=1),) * (1 + MAX_BRANCHES))], "length <= 256"),
        ([make_sample(spans=(Span(version=1, step=1, start=0, end=1),) * 4097)], "length <= 4096"),
        ([make_sample(num_tokens=LONG, **BESIDE_TOKENS)] * 5, "a group of 8.* sampling.num_samples"),
    ],
)
def test_what_every_learner_would_refuse_is_not_encoded(made: list[Sample], words: str) -> None:
    with pytest.raises(WireError, match=words):
        encode_group(make_group(make_ticket(0), samples=tuple(made)))
