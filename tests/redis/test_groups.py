"""`streamrl groups` on a live run and on a recording of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.ops.cli.main import main
from streamrl.protocol.transport.keys import Keys
from tests.helpers import wait_until_async
from tests.redis.run_world import RunWorld


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    world = RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)
    world.learner.plan()
    return world


@pytest.fixture
def told(world: RunWorld, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of `streamrl groups ...` on the run."""

    def call(*arguments: str, here: bool = True) -> tuple[int, str, str]:
        capsys.readouterr()
        where = ["--redis", world.url, "--run", world.keys.name] if here else []
        code = main(["groups", *arguments, *where])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def tickets(out: str) -> list[int]:
    return [json.loads(line)["ticket"] for line in out.splitlines()]


async def test_tail_shows_the_newest_and_show_finds_by_ticket_and_by_id(world: RunWorld, told: Any) -> None:
    await world.answer_all()

    code, out, _ = told("tail", "-n", "2", "--json")
    assert (code, tickets(out)) == (0, [4, 5])
    entry_id = json.loads(out.splitlines()[0])["id"]
    assert tickets(told("show", "1", "--json")[1]) == [1]
    assert tickets(told("show", entry_id, "--json")[1]) == [4]
    assert "ticket 1 " in told("show", "1")[1]


async def test_a_group_that_is_not_there_is_told_with_what_may_help(world: RunWorld, told: Any) -> None:
    code, _, err = told("show", "99")
    assert code == 2
    assert "no group 99 is in Redis now" in err
    assert "no groups at the moment" in told("tail")[2]


async def test_a_recording_shows_the_same_as_the_live_run(world: RunWorld, told: Any, tmp_path: Path) -> None:
    await world.answer_all()
    folder = str(tmp_path / "recording")
    where = ["--redis", world.url, "--run", world.keys.name]
    assert main(["record", *where, "--output", folder, "--once"]) == 0

    assert told("tail", folder, "-n", "9", here=False)[1] == told("tail", "-n", "9")[1]
    assert told("show", folder, "3", here=False)[1] == told("show", "3")[1]
    assert "holds no group 99" in told("show", folder, "99", here=False)[2]


async def test_an_entry_that_is_no_group_is_told_and_passed_over(world: RunWorld, told: Any) -> None:
    world.client.xadd(world.keys.groups("train"), {"n": 1, "u": "x", "h": b"\x1b[2Jjunk", "b": b""})
    await world.answer_all()

    code, out, err = told("tail", "-n", "99", "--json")

    assert (code, len(tickets(out))) == (0, 6)
    assert "cannot be read" in err
    assert "\x1b" not in err


async def test_tail_follows_until_the_run_ends(world: RunWorld) -> None:
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "groups", "tail", "-f", "-n", "99", "--json"]
    seen: list[int] = []
    exit_codes: list[int] = []

    def follow() -> None:
        where = ["--redis", world.url, "--run", world.keys.name]
        with subprocess.Popen([*command, *where], stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            seen.extend(json.loads(line)["ticket"] for line in tail.stdout)
        exit_codes.append(tail.returncode)

    await world.answer_all()
    follower = threading.Thread(target=follow)
    follower.start()
    await wait_until_async(lambda: told_of(seen, range(6)), description="what is there is shown")
    await world.train_steps(1)
    world.learner.plan()
    await world.answer_all()
    await wait_until_async(lambda: told_of(seen, range(9)), description="what comes is shown")
    world.learner.stream.release("finished")
    await wait_until_async(lambda: told_of(exit_codes, [0]), description="it ends with the run")
    follower.join(10)
    assert seen == sorted(set(seen))


async def told_of(seen: Sequence[int], wanted: Iterable[int]) -> bool:
    return set(wanted) <= set(seen)
