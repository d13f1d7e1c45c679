from __future__ import annotations

import pytest

from streamrl.learner.groups.counts import Lengths
from streamrl.protocol.wire.group import GroupHeader, decode_header, encode_group
from streamrl.telemetry.metrics import is_metric
from tests.helpers import make_group, make_sample, make_ticket


def header(*lengths: int) -> GroupHeader:
    samples = tuple(make_sample(num_tokens=length) for length in lengths)
    return decode_header(encode_group(make_group(make_ticket(0), samples=samples))[0])


def test_the_longest_response_says_which_length_a_group_has() -> None:
    lengths = Lengths(1024, {})
    for longest in (0, 1, 128, 129, 512, 513, 1024, 5000):
        lengths.count(header(longest, 0), dropped=longest > 500)
    assert lengths.known() == {128: (3, 0), 256: (1, 0), 512: (1, 1), 1024: (3, 3)}
    metrics = lengths.metrics()
    assert (metrics["stream/dropped_by_length/1024"], metrics["stream/drop_rate_by_length/1024"]) == (3, 1.0)
    assert (metrics["stream/dropped_by_length/128"], metrics["stream/drop_rate_by_length/128"]) == (0, 0.0)
    assert [name for name in metrics if not is_metric(name)] == []


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 100])
def test_every_length_has_a_bucket_however_short_responses_are(max_tokens: int) -> None:
    lengths = Lengths(max_tokens, {})
    for length in range(max_tokens + 1):
        lengths.count(header(length), dropped=False)
    assert sum(ended for ended, _ in lengths.known().values()) == max_tokens + 1
    assert max(lengths.known()) == max_tokens


def test_counting_goes_on_where_a_checkpoint_left_off() -> None:
    lengths = Lengths(8, {4: (10, 5), 64: (1, 1)})
    lengths.count(header(3), dropped=True)
    assert lengths.known() == {4: (11, 6), 64: (1, 1)}
