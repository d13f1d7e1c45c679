from __future__ import annotations

import random

from streamrl.learner.groups.backlog import Backlog, largest_group
from streamrl.protocol.transport.types import PresentGroup
from streamrl.protocol.wire.routes import RouteShape
from tests.worker_world import worker_config


def full(*sizes: int, max_bytes: int = 1000) -> Backlog:
    backlog = Backlog(max_bytes=max_bytes, largest_group=100)
    for at, size in enumerate(sizes):
        backlog.add(f"{at}-0", size)
    return backlog


def test_room_is_what_is_left_for_groups_of_the_usual_size() -> None:
    backlog = full(100, 300)
    assert backlog.room(0) == 6, "of the largest size, until one has come"
    for _ in range(2):
        backlog.expect(60)
        assert (backlog.room(0), backlog.room(7), backlog.room(12)) == (10, 3, -2)
    assert backlog.expected(5) == 400 + 5 * 60


def test_groups_of_very_different_sizes_leave_a_margin_that_nearly_always_holds() -> None:
    rng = random.Random(0)
    sizes = [int(100 * rng.lognormvariate(0, 1)) for _ in range(256)]
    backlog = full(max_bytes=20_000)
    for size in sizes:
        backlog.expect(size)
    count = backlog.room(0)
    sums = [sum(rng.choices(sizes, k=count)) for _ in range(1000)]
    assert sum(total > 20_000 for total in sums) <= 10
    assert sorted(sums)[500] > 10_000, "and it does not waste the room"


def test_the_latest_groups_say_what_is_usual() -> None:
    backlog = full()
    for size in [1000] * 500 + [10] * 300:
        backlog.expect(size)
    assert backlog.room(0) == 100


def test_an_entry_that_is_read_twice_counts_once() -> None:
    backlog = full(100, 300)
    backlog.add("1-0", 300)
    assert backlog.num_bytes == 400


def test_a_commit_lets_go_of_what_has_ended_and_names_what_the_trim_leaves() -> None:
    backlog = full(10, 20, 40, 80, 160)
    assert backlog.freeable(["1-0", "4-0", "9-0"]) == 130
    ended = backlog.forget_freed(cursor="3-0", carry=["1-0"], trim_below="1-0")
    assert ended == ["2-0", "3-0"]
    assert backlog.num_bytes == 20 + 160
    assert backlog.forget_freed(cursor="3-0", carry=["1-0"], trim_below="1-0") == []


def test_a_recount_believes_the_server_about_what_was_read() -> None:
    backlog = full(10, 20)
    groups = [PresentGroup(entry_id=f"{at}-0", number=at, identity="", num_bytes=50) for at in range(1, 5)]
    backlog.recount(groups, cursor="2-0")
    assert backlog.num_bytes == 100
    assert backlog.freeable(["1-0"]) == 50


def test_before_any_group_has_come_routes_count_as_they_may_be() -> None:
    config = worker_config()  # 4 samples of 16 tokens, 32 of a prompt
    shape = RouteShape(num_layers=48, num_chosen=8, num_experts=128)
    assert largest_group(config, shape) - largest_group(config) == (32 + 4 * 16) * 384
