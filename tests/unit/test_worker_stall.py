"""How fast an engine is, and when it counts as hanging."""

from __future__ import annotations

import pytest

from streamrl.errors import EngineError
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineStats
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rollout import stall
from streamrl.workers.rollout.stall import Pace, watch_engine


def stats(*, in_flight: int, num_made: int, is_busy: bool = False) -> EngineStats:
    return EngineStats(in_flight=in_flight, num_made=num_made, num_waiting=0, kv_used=0.0, is_busy=is_busy)


class Dying(EngineDouble):
    """An engine that is busy until it is asked."""

    def stats(self) -> EngineStats:
        return stats(in_flight=7, num_made=1)

    async def check_alive(self) -> None:
        raise EngineError("its process is gone")


async def test_the_figures_of_an_engine_that_is_gone_are_not_shown_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_ALIVE_EVERY_S", 0.2)
    progress = Progress(part="worker/0", role="worker")
    with pytest.raises(EngineError, match="its process is gone"):
        await watch_engine(Dying(), progress, facts=lambda: {"seen": 1}, stall_s=2.0)
    detail = progress.report().detail
    assert [detail[name] for name in ("seen", "in_flight", "kv_used", "tokens_per_s")] == [1, 0, 0.0, 0]


def test_tokens_that_come_at_all_keep_an_engine_alive() -> None:
    now = [0.0]
    pace = Pace(stats(in_flight=0, num_made=0), stall_s=10.0, clock=lambda: now[0])
    for number in range(10):
        now[0] += 9.0
        pace.look(stats(in_flight=4, num_made=number + 1))


def test_an_idle_engine_owes_no_tokens_and_its_time_begins_with_the_next_sample() -> None:
    now = [0.0]
    pace = Pace(stats(in_flight=0, num_made=0), stall_s=10.0, clock=lambda: now[0])
    now[0] = 100.0
    pace.look(stats(in_flight=0, num_made=0))
    for now[0] in (105.0, 109.0):
        pace.look(stats(in_flight=1, num_made=0))
    now[0] = 111.0
    with pytest.raises(EngineError, match="generated no token for 11 s while 1 samples"):
        pace.look(stats(in_flight=1, num_made=0))


def test_an_engine_that_was_stopped_with_its_worker_gets_time_to_go_on() -> None:
    now = [0.0]
    pace = Pace(stats(in_flight=4, num_made=7), stall_s=10.0, clock=lambda: now[0])
    now[0] = 3600.0
    pace.look(stats(in_flight=4, num_made=7))
    now[0] = 3604.0
    pace.look(stats(in_flight=4, num_made=7))
    now[0] = 3606.0
    with pytest.raises(EngineError, match="for 11 s"):
        pace.look(stats(in_flight=4, num_made=7))


def test_an_engine_that_loads_or_returns_weights_owes_no_tokens_meanwhile() -> None:
    now = [0.0]
    pace = Pace(stats(in_flight=4, num_made=7), stall_s=10.0, clock=lambda: now[0])
    for now[0] in range(1, 401):
        pace.look(stats(in_flight=4, num_made=7, is_busy=True))
    for now[0] in (404.0, 408.0):
        pace.look(stats(in_flight=4, num_made=7))
    pace.look(stats(in_flight=4, num_made=7, is_busy=True))  # frequent loads do not hide that it hangs
    now[0] = 411.0
    with pytest.raises(EngineError, match="for 11 s"):
        pace.look(stats(in_flight=4, num_made=7))


def test_the_pace_is_that_of_the_last_seconds() -> None:
    now = [100.0]
    pace = Pace(stats(in_flight=4, num_made=5000), stall_s=60.0, clock=lambda: now[0])
    assert pace.look(stats(in_flight=4, num_made=5000)) == 0.0
    for second in range(1, 31):
        now[0] += 1.0
        told = pace.look(stats(in_flight=4, num_made=5000 + 7 * min(second, 20)))
        assert second > 20 or told == 7.0
    assert told == 0.0
