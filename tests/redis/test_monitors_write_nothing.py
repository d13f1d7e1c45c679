"""What Redis itself logs over a session of every command that looks: not one write."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.errors import TransportError
from streamrl.ops.cli.main import main
from streamrl.ops.monitor.runs import list_runs, open_server
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys
from tests.helpers import wait_until
from tests.redis.monitor_world import Watched, healthy_run
from tests.redis.run_world import RunWorld
from tests.redis.test_dashboard import dashboard
from tests.terminal_world import in_terminal


@pytest.fixture
async def run(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> Watched:
    return await healthy_run(RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url))


def session(run: Watched, target: list[str], output: Path) -> None:
    """Every command, with everything that it can show."""
    main(["status", *target])
    main(["status", *target, "--json"])
    main(["why", *target])
    main(["runs", "ls", "--redis", run.world.url])
    main(["plot", *target, "-o", str(output)])
    main(["groups", "tail", *target])
    with in_terminal(["top", *target]) as program:
        program.shows("tokens/s", "q quit")
        program.press("g")
        program.shows("worker/test")
        program.press("\r")
        program.shows("sample 1")
    with dashboard(run) as url:
        for path in ("api/view", "api/history", "api/rollouts", "metrics"):
            urllib.request.urlopen(f"{url}{path}", timeout=240).close()


def write_commands(client: redis.Redis) -> set[str]:
    """As the server itself flags them."""
    told: Any = client.command()
    return {name.upper() for name, about in told.items() if "write" in about["flags"]} | {"EVAL", "EVALSHA", "FCALL"}


def test_no_monitor_writes(run: Watched, client: redis.Redis, tmp_path: Path) -> None:
    target = ["--redis", run.world.url, "--run", run.world.keys.name]
    writes = write_commands(client)
    assert {"HSET", "XADD", "DEL"} <= writes
    before: Any = client.info("commandstats")
    session(run, target, tmp_path / "x.png")
    after: Any = client.info("commandstats")
    grown = {
        name.removeprefix("cmdstat_").partition("|")[0].upper()
        for name, stats in after.items()
        if stats["calls"] > before.get(name, {"calls": 0})["calls"]
    }
    assert "HGETALL" in grown
    assert grown & writes == set()


def test_a_reader_needs_no_more_than_the_right_to_read(run: Watched, client: redis.Redis) -> None:
    """A user of Redis who may read, and nothing else."""
    client.acl_setuser(
        "onlooker",
        enabled=True,
        passwords=["+secret"],
        keys=["streamrl:*"],
        categories=["+@read", "+@connection"],
        commands=["+info", "+time", "+xpending"],
        reset=True,
    )
    try:
        path = run.world.url.removeprefix("unix://")
        url = f"unix://onlooker:secret@{path}"
        command = [
            sys.executable,
            "-m",
            "streamrl.ops.cli.main",
            "status",
            "--redis",
            url,
            "--run",
            run.world.keys.name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert (done.returncode, "healthy" in done.stdout) == (0, True), done.stdout + done.stderr
        with pytest.raises(redis.exceptions.NoPermissionError):
            redis.Redis.from_url(url).hset("streamrl:x", "a", "b")
    finally:
        client.acl_deluser("onlooker")


def test_what_a_monitor_cannot_read_hides_nothing_else(run: Watched, client: redis.Redis) -> None:
    client.hset(run.world.keys.progress, "rogue", b"\xff")
    client.hset(run.world.keys.progress, "worker/odd", encode_report(run_report()))
    wait_until(lambda: len(run.view().workers) == 2, description="both sound reports are shown")


def test_one_broken_run_hides_no_other_in_the_list(run: Watched, client: redis.Redis) -> None:
    broken = Keys(f"{run.world.keys.name}-broken")
    client.hset(broken.meta, mapping={"state": b"\xff", "term": "no number", "step": "inf", "created_at": ""})

    listed = {one.name: one for one in list_runs(client).runs}

    assert listed[run.world.keys.name].term == 1
    assert (listed[broken.name].term, listed[broken.name].step, listed[broken.name].created_at) == (0, 0, None)


def test_what_the_server_refuses_is_one_error_with_its_name(redis_url: str) -> None:
    with pytest.raises(TransportError, match=r"^Redis at .*: unknown command"), open_server(redis_url) as client:
        client.execute_command("NOSUCHCOMMAND")


def run_report() -> Any:
    from streamrl.telemetry.progress import Progress

    progress = Progress(part="worker/odd", role="worker")
    progress.note(step="no number", version=1.5, tokens_per_s="fast")
    return progress.report()
