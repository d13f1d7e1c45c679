"""The hosts of one engine: who joins, what they are told, and how soon each hears that another is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamrl.errors import ConfigError, EngineError, ResourceError, WeightsError
from streamrl.process import parse_address
from streamrl.versions import make_version
from streamrl.workers.engines.vllm.loading.host_mirror import MIRROR_VARIABLE, mirror_here, tag_of
from streamrl.workers.hosts.first import open_hosts
from streamrl.workers.hosts.link import LONGEST_LINE, Link
from tests.helpers import wait_until_async
from tests.hosts_world import HostsWorld

VERSION = make_version(1, 3)


async def test_an_engine_begins_when_all_hosts_have_joined_and_all_get_its_seed_and_where_ranks_meet() -> None:
    async with HostsWorld(num=3).open() as world:
        beginning = asyncio.create_task(world.hosts.begin(seed=7))
        first = world.further("a")
        await first.does("wait for an engine to start")
        report = world.progress.report()
        assert (report.doing, report.detail["hosts"], report.detail["hosts_wanted"]) == ("hosts", 2, 3)
        second = world.further("b")
        meeting = await beginning
        for further in (first, second):
            await further.does("serve")
        assert {one.ranks[0].meeting.node for one in (first, second)} == {1, 2}
        for one in (first, second):
            [ranks] = one.ranks
            assert (ranks.meeting.address, ranks.meeting.port, ranks.seed) == (meeting.address, meeting.port, 7)
        world.hosts.end()
        await first.does("wait for an engine to start")
        assert first.ranks[0].killed


async def test_a_host_that_does_not_come_is_missed_by_name_of_what_to_start() -> None:
    async with HostsWorld(start_timeout_s=0.05).open() as world:
        with pytest.raises(EngineError, match=r"1 of the 2 hosts.*--join.*127\.0\.0\.1:\d+"):
            await world.hosts.begin(seed=1)


async def test_one_host_more_than_there_are_places_waits_for_one() -> None:
    async with HostsWorld().open() as world:
        first = world.further("a")
        await first.does("wait for an engine to start")
        spare = world.further("b")

        async def told() -> bool:
            return "all 2 hosts have joined already" in str(spare.progress.report().detail.get("not_joined"))

        await wait_until_async(told, description="the one too many is told why")
        first.stop.set()
        await spare.does("wait for an engine to start")


async def test_whoever_does_not_know_the_runs_secret_has_no_place_and_learns_nothing() -> None:
    async with HostsWorld().open() as world:
        stranger = world.further("a", start_timeout_s=0.05)
        stranger.secret = b"another"
        with pytest.raises(EngineError, match="does not know this run's secret"):
            await stranger.task
        other_run = world.further("b", run_uid="another run", start_timeout_s=0.05)
        with pytest.raises(EngineError, match="does not know this run's secret"):
            await other_run.task
        assert world.progress.report().detail["hosts"] == 1


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xfe\n",
        b"[1]\n",
        b"x" * (LONGEST_LINE + 2),
        b"[" * 60_000 + b"\n",
        b'{"number": "1"}\n{"proof": 1}\n',
        b'{"number": "\\ud800"}\n{"proof": "\\ud800"}\n',
    ],
)
async def test_what_is_no_message_of_ours_ends_the_connection_and_nothing_else(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with HostsWorld().open() as world:
        host, _, port = world.hosts.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        async with asyncio.timeout(5):
            while await reader.read(1000):
                pass
        writer.close()
        await world.further("a").does("wait for an engine to start")
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_a_version_is_brought_when_every_host_has_it_and_whoever_lacks_it_is_named() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        await world.hosts.bring(VERSION)
        await world.hosts.bring(VERSION, refetch=True)
        assert further.copy.brought == [(VERSION, False), (VERSION, True)]
        further.copy.missing.add(VERSION)
        with pytest.raises(WeightsError, match=r"gpu-2 on .* does not have version 1\.3: its manifest is gone"):
            await world.hosts.bring(VERSION)
        assert not further.task.done()


async def test_the_first_host_hears_that_bytes_arrive_while_it_waits() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        further.copy.may_end.clear()
        heard = asyncio.Event()
        bringing = asyncio.create_task(world.hosts.bring(VERSION, bytes_arrived=heard.set))
        async with asyncio.timeout(20):
            await heard.wait()
            assert not bringing.done()
            further.copy.may_end.set()
            await bringing
        assert further.copy.brought == [(VERSION, False)]


async def test_a_host_without_room_for_the_weights_ends_and_the_engine_says_why() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        further.copy.error = ResourceError("no room")
        bringing = asyncio.create_task(world.hosts.bring(VERSION))
        assert "host 2 of 2 (gpu-2 on " in (lost := await world.hosts.lost())
        assert lost.endswith("is lost: no room")
        with pytest.raises(WeightsError, match="no room"):
            await bringing
        with pytest.raises(ResourceError, match="no room"):
            await further.task


async def test_a_rank_that_dies_on_a_further_host_ends_the_engine_and_the_host_joins_again() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        await further.does("serve")
        further.ranks[0].die("its rank 1 ended with code -9")
        assert (await world.hosts.lost()).endswith("is lost: its rank 1 ended with code -9")
        world.hosts.end()
        await world.hosts.begin(seed=2)
        await further.does("serve")
        assert [ranks.seed for ranks in further.ranks] == [1, 2]
        assert further.ranks[0].killed


async def test_a_setting_that_vllm_refuses_on_a_further_host_ends_it() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2")
        further.start_error = ConfigError("vLLM refuses this model")
        await world.hosts.begin(seed=1)
        assert "vLLM refuses this model" in await world.hosts.lost()
        with pytest.raises(ConfigError):
            await further.task


async def test_what_breaks_ranks_unexpectedly_is_told_the_first_host_and_logged_and_the_host_joins_again() -> None:
    async with HostsWorld().open() as world, asyncio.timeout(5):
        further = world.further("gpu-2")
        further.start_error = error = RuntimeError("the driver is broken")
        with capture_logs() as logs:
            await world.hosts.begin(seed=1)
            assert (await world.hosts.lost()).endswith("is lost: RuntimeError: the driver is broken")
        assert error in [line.get("exc_info") for line in logs]
        further.start_error = None
        world.hosts.end()
        await world.hosts.begin(seed=2)
        await further.does("serve")


async def test_a_disk_that_is_full_on_a_further_host_is_told_the_first_host_and_the_host_joins_again() -> None:
    async with HostsWorld().open() as world, asyncio.timeout(5):
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        further.copy.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/version")
        with pytest.raises(WeightsError, match=r"gpu-2 .*OSError: .*No space left on device: '/dev/shm/version'"):
            await world.hosts.bring(VERSION)
        further.copy.error = None
        world.hosts.end()
        await world.hosts.begin(seed=2)
        await world.hosts.bring(VERSION)
        assert further.copy.brought == [(VERSION, False)]


async def test_a_host_whose_process_ends_is_lost_at_once() -> None:
    async with HostsWorld(silent_s=600.0).open() as world:
        further = world.further("gpu-2")
        await world.hosts.begin(seed=1)
        further.task.cancel()
        async with asyncio.timeout(5):
            assert "its connection ended" in await world.hosts.lost()


async def test_a_host_that_is_cut_off_is_lost_after_the_silence_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HostsWorld(silent_s=0.5).open() as world:
        further = world.further("gpu-2", silent_s=0.5)
        await world.hosts.begin(seed=1)
        await further.does("serve")
        cut = time.monotonic()
        monkeypatch.setattr(Link, "send", lambda link, message: None)  # as when the network takes nothing any more
        assert "it sent nothing for 0.5 s" in await world.hosts.lost()
        assert time.monotonic() - cut < 5

        async def killed() -> bool:
            return further.ranks[0].killed

        await wait_until_async(killed, description="its ranks are killed, too")
        assert not further.task.done()


async def test_hosts_leave_with_the_first_one_and_at_the_end_of_the_run() -> None:
    async with HostsWorld().open() as world:
        further = world.further("a")
        await further.does("wait for an engine to start")
        await world.leave()
        await further.task
        late = world.further("b")
        late.over = True
        await late.task


async def test_hosts_of_a_worker_that_failed_join_the_one_that_is_started_in_its_place() -> None:
    async with HostsWorld().open() as world:
        further = world.further("a")
        await further.does("wait for an engine to start")
        await world.fail(EngineError("the engine failed 3 times in a row"))
        async with open_hosts(world.hosts, parse_address(world.hosts.address, what="first")):
            await world.hosts.begin(seed=2)
            await further.does("serve")


async def test_a_host_that_is_told_to_stop_lets_the_first_one_end_its_answers() -> None:
    async with HostsWorld().open() as world:
        further = world.further("a", grace_s=600.0)
        await world.hosts.begin(seed=1)
        await further.does("serve")
        further.stop.set()
        await further.does("stop")
        assert not further.ranks[0].killed
        await world.leave()
        async with asyncio.timeout(5):
            await further.task
        assert further.ranks[0].killed


async def test_a_host_that_is_told_to_stop_alone_leaves_after_its_grace() -> None:
    async with HostsWorld().open() as world:
        further = world.further("a", grace_s=0.05)
        await world.hosts.begin(seed=1)
        await further.does("serve")
        further.stop.set()
        await further.task
        assert "it was stopped" in await world.hosts.lost()


async def test_a_host_that_comes_back_before_it_was_missed_takes_its_own_place() -> None:
    async with HostsWorld(silent_s=600.0).open() as world:
        world.further("a")
        await world.hosts.begin(seed=1)
        again = world.further("a")
        assert "it has joined again" in await world.hosts.lost()
        await again.does("wait for an engine to start")


def test_a_rank_loads_from_its_own_hosts_mirror_and_no_other_version_than_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mirror_here("/dev/shm/first", version=VERSION) == "/dev/shm/first"
    own = tmp_path / "mirror.safetensors"
    monkeypatch.setenv(MIRROR_VARIABLE, str(own))
    with pytest.raises(ValueError, match="holds no complete version"):
        mirror_here("/dev/shm/first", version=0)
    tag_of(own).write_text(str(VERSION))
    assert mirror_here("/dev/shm/first", version=VERSION) == str(own)
    assert mirror_here("/dev/shm/first", version=0) == str(own)
    with pytest.raises(ValueError, match=r"host .* holds 1\.3 of the weights, not 1\.4"):
        mirror_here("/dev/shm/first", version=make_version(1, 4))


async def test_a_version_is_not_waited_for_from_a_host_that_is_lost_already() -> None:
    async with HostsWorld().open() as world:
        further = world.further("gpu-2", grace_s=0.0)
        await world.hosts.begin(seed=1)
        further.stop.set()
        await world.hosts.lost()
        async with asyncio.timeout(5):
            with pytest.raises(WeightsError, match="it was stopped"):
                await world.hosts.bring(VERSION)
