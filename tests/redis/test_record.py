"""`streamrl record` on a live run: everything that passes is saved, and the run does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.errors import DataError, RunGone
from streamrl.ops.cli.main import main
from streamrl.ops.record.tap import Tap, record
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin, Recording
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run
from tests.helpers import wait_until
from tests.redis.run_world import RunWorld

WRITES = ("xadd", "xdel", "xtrim", "xack", "hset", "set", "del", "eval", "evalsha", "xgroup", "xreadgroup", "xsetid")
REFUSED_BY_A_FULL_SERVER = (*WRITES, "multi")  # by some versions even if it only reads


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    world = RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)
    world.learner.plan()
    return world


def record_once(world: RunWorld, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, int]:
    capsys.readouterr()
    where = ["--redis", world.url, "--run", world.keys.name, "--output", str(folder)]
    assert main(["record", *where, "--once", "--json", *options]) == 0
    told: dict[str, int] = json.loads(capsys.readouterr().out)
    return told


async def test_what_is_in_redis_is_saved_once_and_only_once(
    world: RunWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.answer_all()
    assert record_once(world, tmp_path / "recording", capsys)["groups"] == 6
    await world.train_steps(1)
    world.learner.commit()
    await world.answer_all()
    told = record_once(world, tmp_path / "recording", capsys)

    delivered = [entry.number for entry in Recording.open(tmp_path / "recording").entries()]
    assert delivered == sorted(set(delivered))
    assert told["groups"] == len(delivered) - 6


async def test_recording_sends_nothing_to_redis_that_a_full_one_refuses(
    world: RunWorld, tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.answer_all()

    def calls() -> dict[str, int]:
        stats = client.info("commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in REFUSED_BY_A_FULL_SERVER}

    before = calls()
    record_once(world, tmp_path / "recording", capsys)
    assert calls() == before


async def test_a_live_session_follows_the_run_to_its_end(
    world: RunWorld, tmp_path: Path, client: redis.Redis, is_redis_7: bool
) -> None:
    tap = Tap(client, world.keys, run_uid=world.learner.uid)
    origin = Origin(run="run", run_uid=world.learner.uid, fingerprint="model", model="m")
    with RecordingWriter(tmp_path / "recording", origin, file_bytes=4000, max_bytes=1 << 30) as writer:
        session = threading.Thread(
            target=lambda: record(tap, writer, stopped=lambda: False, follow=True, show=lambda: None)
        )
        session.start()
        trained = []
        for _ in range(3):
            trained += await world.train_steps(1)
            wait_until(lambda: writer.last_id >= world.learner.feed.state().cursor, description="the recorder is there")
            world.learner.commit()
        world.learner.stream.release("finished")
        session.join(20)
        assert not session.is_alive()

    recording = Recording.open(tmp_path / "recording")
    assert set(trained) <= recording.numbers()
    assert tap.num_missed == (0 if is_redis_7 else None)


async def test_groups_that_went_by_unseen_are_counted(
    world: RunWorld, tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    tap = Tap(client, world.keys, run_uid=world.learner.uid)
    tap.look_back()
    trained = await world.train_steps(2)
    world.learner.commit()

    assert len(tap.look_back()) < len(trained)
    if "entries-added" in client.xinfo_stream(world.keys.groups("train")):
        assert tap.num_missed is not None
        assert tap.num_missed >= len(trained)
    else:  # Redis 6.2 does not tell
        assert tap.num_missed is None


@pytest.mark.parametrize("all_trimmed", [False, True])
async def test_groups_that_went_by_between_two_sessions_are_not_counted_as_none(
    world: RunWorld, tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str], all_trimmed: bool
) -> None:
    stream = world.keys.groups("train")
    await world.answer_all()
    is_counted = record_once(world, tmp_path / "recording", capsys)["missed"] is not None
    again = record_once(world, tmp_path / "recording", capsys)
    assert (again["groups"], again["missed"]) == (0, 0 if is_counted else None)
    client.xtrim(stream, maxlen=0)
    again = record_once(world, tmp_path / "recording", capsys)
    assert again["missed"] == (0 if is_counted else None), "all of these were recorded"
    for _ in range(2):
        client.xadd(stream, {"n": "0"})
    client.xtrim(stream, maxlen=0 if all_trimmed else 1, approximate=False)
    again = record_once(world, tmp_path / "recording", capsys)
    assert (again["groups"], again["missed"]) == (0 if all_trimmed else 1, None)


def test_a_session_of_a_run_that_is_removed_ends_and_says_so(
    world: RunWorld, tmp_path: Path, client: redis.Redis
) -> None:
    tap = Tap(client, world.keys, run_uid=world.learner.uid)
    assert tap.run_state() == "running"
    remove_run(client, world.keys)
    origin = Origin(run="run", run_uid=world.learner.uid, fingerprint="model", model="m")
    with RecordingWriter(tmp_path / "recording", origin, file_bytes=4000, max_bytes=1 << 30) as writer:
        looks = iter(range(3))
        with pytest.raises(RunGone, match=r"run '.*' was removed from Redis"):
            record(tap, writer, stopped=lambda: next(looks, None) is None, follow=True, show=lambda: None)
    client.flushall()
    assert tap.run_state() is None, "its learner will claim it again"


async def test_a_recorder_of_a_run_that_is_removed_prints_what_it_has_recorded(
    world: RunWorld, tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.answer_all()
    removing = threading.Thread(target=remove_once_recorded, args=(client, world.keys, tmp_path / "recording"))
    removing.start()
    where = ["--redis", world.url, "--run", world.keys.name, "--output", str(tmp_path / "recording")]
    exit_code = main(["record", *where, "--json"])
    removing.join()

    told = capsys.readouterr()
    assert exit_code == 1
    assert json.loads(told.out)["groups"] == 6
    assert "was removed from Redis" in told.err


def remove_once_recorded(client: redis.Redis, keys: Keys, folder: Path) -> None:
    wait_until(lambda: folder.exists() and num_groups(folder) == 6, description="all are recorded")
    remove_run(client, keys)


class Interrupted:
    """A client whose calls in one trip leave time for something else after the first."""

    def __init__(self, client: redis.Redis, act: Callable[[], object]) -> None:
        self._client, self._act = client, act
        self._replies: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, *, transaction: bool) -> contextlib.AbstractContextManager[Interrupted]:
        self._replies = []
        return contextlib.nullcontext(self)

    def xread(self, *args: Any, **options: Any) -> None:
        self._note(self._client.xread(*args, **options))

    def xinfo_stream(self, name: str) -> None:
        self._note(self._client.xinfo_stream(name))

    def _note(self, reply: Any) -> None:
        self._replies.append(reply)
        if len(self._replies) == 1:
            self._act()

    def execute(self, *, raise_on_error: bool) -> list[Any]:
        return self._replies


def test_a_group_that_comes_while_the_missed_are_counted_is_not_one_of_them(
    world: RunWorld, client: redis.Redis, is_redis_7: bool
) -> None:
    stream = world.keys.groups("train")
    coming = [1, 0, 1, 1, 0]  # groups, while it looks back
    interrupted: Any = Interrupted(client, lambda: [client.xadd(stream, {"n": "0"}) for _ in range(coming.pop(0))])
    tap = Tap(interrupted, world.keys, run_uid=world.learner.uid)
    assert [len(tap.look_back()) for _ in range(4)] == [1, 0, 1, 1]
    client.xadd(stream, {"n": "0"})
    client.xtrim(stream, maxlen=0)
    assert tap.num_missed == (0 if is_redis_7 else None)
    tap.look_back()
    assert tap.num_missed == (1 if is_redis_7 else None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_recorder_that_is_ended_leaves_a_recording_that_the_next_one_continues(
    world: RunWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    folder = tmp_path / "recording"
    await world.answer_all()
    exit_code, out = await asyncio.to_thread(end_a_recorder, world, folder, number)
    if number == signal.SIGINT:
        assert exit_code == 0
        assert json.loads(out)["groups"] == 6
    await world.train_steps(3)
    await world.answer_all()

    record_once(world, folder, capsys)

    assert num_groups(folder) > 6


def end_a_recorder(world: RunWorld, folder: Path, number: signal.Signals) -> tuple[int, str]:
    """(its exit code, what it said) after the signal, which it gets when it has recorded what is there."""
    where = ["--redis", world.url, "--run", world.keys.name, "--output", str(folder), "--json"]
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "record", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        try:
            wait_until(lambda: folder.exists() and num_groups(folder) == 6, description="all are recorded")
        finally:
            recorder.send_signal(number)
        out, _ = recorder.communicate(timeout=240)
    return recorder.returncode, out


def num_groups(folder: Path) -> int:
    with contextlib.suppress(DataError):  # not begun yet
        return len(Recording.open(folder).places)
    return 0


def test_a_cap_too_small_for_two_files_is_a_mistake(
    world: RunWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--redis", world.url, "--run", world.keys.name, "--output", str(tmp_path / "recording")]
    assert main(["record", *where, "--max-bytes", "300MB"]) == 2
    assert "must be at least twice --file-bytes" in capsys.readouterr().err
