"""Which numbers of ranks a layout can do with."""

from __future__ import annotations

import pytest

from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.errors import ConfigError


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_ranks_that_a_layout_divides_are_taken(ranks: int) -> None:
    refuse_layout(schema.Layout(replicas=2), ranks)


def test_others_are_refused_with_both_numbers_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"learner\.layout\.replicas = 4 .*ranks, 6: .*a divisor.*multiple of 4 ranks"
    ):
        refuse_layout(schema.Layout(replicas=4), 6)


def test_what_divides_the_ranks_and_not_those_of_a_replica_is_told_so() -> None:
    with pytest.raises(
        ConfigError,
        match=r"layout\.context = 2 in each of learner\.layout\.replicas = 3 .*ranks, 9: .*multiple of 6 ranks",
    ):
        refuse_layout(schema.Layout(replicas=3, context=2), 9)
