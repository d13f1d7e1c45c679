"""T23: the users that `streamrl redis acl` prints: all that a role does works under its user, and no more than that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.config import schema
from streamrl.errors import ResourceError, TransportError
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.acl import ROLES, Role, rules
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.peers import Peers
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.redis_store import RedisStore
from tests.faults.report import Row, note
from tests.redis.monitor_world import Watched, healthy_run
from tests.redis.run_world import RunWorld
from tests.redis.test_monitors_write_nothing import session, write_commands

SETTINGS = schema.Redis(connect_timeout_s=2.0)
REFUSED = r"ACL failure|permissions|can't access"  # of what a script does; Redis 7.0 says the last
# Of the commands that Redis itself calls dangerous or administrative, the one that a role may use.
HARMLESS = {"INFO"}


@pytest.fixture(autouse=True)
def _needs_selectors(is_redis_7: bool) -> None:
    if not is_redis_7:
        pytest.skip("this server is older than Redis 7, which `ACL DRYRUN` and selectors came with")


def every_key(keys: Keys) -> dict[str, str]:
    """One of each kind of key that a run has."""
    return {
        "meta": keys.meta,
        "tombstone": keys.tombstone,
        "lease": keys.lease,
        "control": keys.control,
        "tickets": keys.tickets("train"),
        "groups": keys.groups("train"),
        "receipt": keys.receipt("w", 0),
        "dead": keys.dead,
        "retry_requests": keys.retry_requests,
        "retried": keys.retried,
        "purged": keys.purged,
        "counters": keys.counters,
        "appends": keys.appends,
        "manifests": keys.manifests,
        "weights": keys.weights,
        "announced": keys.announced,
        "blobs": keys.blobs,
        "blob": keys.blob("u/000001/0", 0),
        "peers": keys.peers("0" * 32),
        "claims": keys.claims("0" * 32),
        "peers_secret": keys.peers_secret,
        "progress": keys.progress,
        "reported": keys.reported,
        "metrics": keys.metrics,
        "thinned": keys.thinned(1),
        "events": keys.events,
    }


# What each role may change at all, and by which commands; written down apart from the rules, by what the parts are for.
MAY_CHANGE: Mapping[Role, Mapping[str, set[str]]] = {
    "worker": {
        "tickets": {"XREADGROUP", "XCLAIM", "XACK", "XDEL"},
        "groups": {"XADD"},
        "receipt": {"SET"},
        "counters": {"HINCRBY"},
        "peers": {"HSET", "HDEL", "PEXPIRE"},
        "claims": {"HSET", "HDEL", "PEXPIRE"},
        "peers_secret": {"SET"},
        "progress": {"HSET", "HDEL", "DEL"},
        "reported": {"ZADD", "ZREM"},
    },
    "learner": {
        "meta": {"HSET", "HSETNX", "HDEL"},
        "tombstone": {"DEL"},
        "lease": {"SET", "DEL"},
        "control": {"DEL"},
        "tickets": {"XADD", "XACK", "XDEL"},
        "groups": {"XDEL", "XTRIM", "XSETID"},
        "appends": {"HSET", "HDEL"},
        "weights": {"HSET"},
        "announced": {"XADD"},
        "counters": {"HINCRBY"},
        "dead": {"XADD", "XDEL"},
        "retry_requests": {"HSET", "HDEL"},
        "purged": {"SREM"},
        "retried": {"HSET", "HDEL"},
        "manifests": {"HSET", "HDEL"},
        "blobs": {"HSET", "HDEL"},
        "blob": {"SET", "UNLINK"},
        "metrics": {"XADD"},
        "thinned": {"XADD"},
        "events": {"XADD"},
        "progress": {"HSET", "HDEL", "DEL"},
        "reported": {"ZADD", "ZREM"},
    },
    "monitor": {},
    "operator": {
        "control": {"HSET", "HDEL", "DEL"},
        "events": {"XADD"},
        "dead": {"XDEL"},
        "retry_requests": {"HSETNX", "HDEL"},
        "purged": {"SADD"},
        "tombstone": {"SET"},
        "meta": {"DEL"},
        "lease": {"DEL"},
        "tickets": {"DEL"},
        "groups": {"DEL"},
    },
}


@pytest.fixture
async def run(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> Watched:
    return await healthy_run(RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url))


@pytest.fixture
def as_role(role_urls: Mapping[Role, str], redis_settings: schema.Redis) -> Iterator[Mapping[Role, redis.Redis]]:
    clients = {role: connect(role_urls[role], redis_settings) for role in ROLES}
    yield clients
    for one in clients.values():
        one.close()


def denied(client: redis.Redis) -> list[str]:
    """What Redis refused since it was last asked. Clients tell their name unasked, and need no answer."""
    log: Any = client.execute_command("ACL", "LOG", "100")
    client.execute_command("ACL", "LOG", "RESET")
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) if isinstance(entry, list) else entry for entry in log]
    told = [{key if isinstance(key, str) else key.decode(): value for key, value in one.items()} for one in entries]
    return [str(one) for one in told if b"setinfo" not in bytes(str(one["object"]).lower(), "ascii")]


async def test_a_whole_run_lives_under_its_roles(
    tmp_path: Path, client: redis.Redis, keys: Keys, role_urls: Mapping[Role, str], redis_settings: schema.Redis
) -> None:
    denied(client)
    with connect(role_urls["learner"], redis_settings) as learner:
        async with connect_async(role_urls["worker"], redis_settings) as worker:
            check_server(learner)
            world = RunWorld(tmp_path, client=learner, async_client=worker, keys=keys, url=role_urls["learner"])
            await world.train_steps(3)
            await world.answer_all()
    assert denied(client) == []


def test_weights_are_stored_by_the_learner_and_read_by_a_worker(
    keys: Keys, as_role: Mapping[Role, redis.Redis]
) -> None:
    name = "u/000001/0-0-aa"
    mine, theirs = (RedisStore(as_role[role], keys, chunk_bytes=4) for role in ("learner", "worker"))
    mine.put(name, b"0123456789")
    assert theirs.get(name) == b"0123456789"
    assert list(mine.list()) == [name]
    with pytest.raises(TransportError, match="streamrl redis acl"):
        theirs.put("u/000001/0-0-bb", b"forged")
    with pytest.raises(TransportError, match=r"(?i)no permissions"):
        RedisStore(as_role["monitor"], keys).get(name)
    mine.delete(name)


def test_workers_tell_each_other_of_pieces_and_nobody_else_reads_their_secret(
    client: redis.Redis, keys: Keys, as_role: Mapping[Role, redis.Redis]
) -> None:
    client.hset(keys.meta, "uid", "u")
    denied(client)
    peers = Peers(as_role["worker"], keys, run_uid="u", address="10.0.0.1:7000")
    told = peers.exchange("0" * 32, have=b"\0", num_pieces=3, taken=(), most=2)
    assert told.assigned == [0, 1]
    assert len(told.secret) == 64
    assert denied(client) == []
    for role in ROLES:
        if role != "worker":
            with pytest.raises(redis.exceptions.NoPermissionError):
                as_role[role].get(keys.peers_secret)


async def test_hosts_of_one_engine_read_the_same_secret_and_none_of_a_run_that_is_not_there(
    client: redis.Redis, keys: Keys, role_urls: Mapping[Role, str], redis_settings: schema.Redis
) -> None:
    async with connect_async(role_urls["worker"], redis_settings) as worker:
        streams = [WorkerStream(worker, keys, worker=name, lease_s=60.0) for name in ("first", "further")]
        assert [await stream.secret() for stream in streams] == [None, None]
        meta = {"uid": "u", "term": 1, "config": "{}", "fingerprint": "f", "state": "running"}
        client.hset(keys.meta, mapping=meta)
        denied(client)
        first, further = [await stream.secret() for stream in streams]
    assert first is not None
    assert (first, len(first)) == (further, 64)
    assert denied(client) == []


def test_everything_that_looks_works_as_a_monitor(
    run: Watched, client: redis.Redis, role_urls: Mapping[Role, str], tmp_path: Path
) -> None:
    run.world.url = role_urls["monitor"]
    denied(client)
    session(run, ["--redis", role_urls["monitor"], "--run", run.world.keys.name], tmp_path / "x.png")
    assert denied(client) == []


def test_everything_that_steers_works_as_an_operator(
    run: Watched, client: redis.Redis, role_urls: Mapping[Role, str]
) -> None:
    target = ["--redis", role_urls["operator"], "--run", run.world.keys.name]
    denied(client)
    for word in ("pause", "resume"):
        main([word, *target, "--timeout-s", "0"])
    for word in ("ls", "retry", "purge"):
        assert main(["dead", word, *target, *(["--all"] if word != "ls" else [])]) == 0
    assert main(["runs", "rm", *target, "--live"]) == 0
    assert denied(client) == []


def dry_run(client: redis.Redis, role: Role, *words: str) -> bool:
    try:
        return client.execute_command("ACL", "DRYRUN", role, *words) in (b"OK", "OK")
    except redis.ResponseError:  # no such call, whoever makes it
        return False


def calls_of(name: str, arity: int, key: str) -> tuple[str, ...]:
    words = {
        "XREADGROUP": ("GROUP", "workers", "w", "STREAMS", key, ">"),
        "XREAD": ("STREAMS", key, "0"),
        "XGROUP": ("CREATE", key, "workers", "0"),
        "XINFO": ("STREAM", key),
        "MEMORY": ("USAGE", key),
        "OBJECT": ("ENCODING", key),
        "BITOP": ("NOT", key, key),
    }.get(name, (key, *["1"] * max(0, abs(arity) - 2)))
    return (name, *words)


@pytest.mark.parametrize("role", ROLES)
def test_no_command_changes_what_its_role_may_not(
    role: Role, client: redis.Redis, keys: Keys, role_urls: Mapping[Role, str]
) -> None:
    told: Any = client.command()
    arities = {name.upper(): about["arity"] for name, about in told.items()}
    writes = write_commands(client) - {"EVAL", "EVALSHA", "FCALL", "XGROUP"}
    allowed = {
        kind: {name for name in writes if dry_run(client, role, *calls_of(name, arities[name], key))}
        for kind, key in every_key(keys).items()
    }
    if role == "operator":  # to remove a run is to remove all of its keys
        assert all("UNLINK" in names for names in allowed.values())
        allowed = {kind: names - {"UNLINK"} for kind, names in allowed.items()}
    found = {kind: names for kind, names in allowed.items() if names}
    num_tried = len(writes) * len(allowed)
    unexpected = sum(len(names - MAY_CHANGE[role].get(kind, set())) for kind, names in found.items())
    note(Row(scenario=f"T23 {role}", injections=num_tried, lost=0, twice=0, more={"unexpected": unexpected}))
    assert found == MAY_CHANGE[role]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_reaches_other_keys_or_commands_of_administration(
    role: Role, client: redis.Redis, role_urls: Mapping[Role, str]
) -> None:
    told: Any = client.command()
    elsewhere = {
        name.upper()
        for name, about in told.items()
        if dry_run(client, role, *calls_of(name.upper(), about["arity"], "elsewhere"))
    }
    listed = [client.execute_command("ACL", "CAT", category) for category in ("dangerous", "admin")]
    # By whole name: of MEMORY and XGROUP a role has one subcommand, which is looked at where its keys are.
    risky = {name.decode().upper().partition("|")[0] for names in listed for name in names}
    assert elsewhere & risky <= HARMLESS
    assert elsewhere & write_commands(client) <= {"EVAL", "EVALSHA"}  # each command in a script is looked at for itself
    for words in (("CONFIG", "GET", "*"), ("FLUSHALL",), ("KEYS", "*"), ("ACL", "LIST"), ("DEBUG", "OBJECT", "x")):
        assert not dry_run(client, role, *words), words


@pytest.mark.parametrize("role", ROLES)
def test_a_script_cannot_do_what_its_caller_may_not(
    role: Role, keys: Keys, as_role: Mapping[Role, redis.Redis]
) -> None:
    forgery = "return redis.call('HSET', KEYS[1], '1', 'forged')"
    if role == "learner":
        as_role[role].eval(forgery, 1, keys.manifests)
    else:
        with pytest.raises(redis.ResponseError, match=REFUSED):
            as_role[role].eval(forgery, 1, keys.manifests)
    with pytest.raises(redis.ResponseError, match=REFUSED):
        as_role[role].eval("return redis.call('SET', KEYS[1], 'x')", 1, "elsewhere")


def test_rules_for_one_run_hold_for_that_run_only(client: redis.Redis, keys: Keys, run_name: str) -> None:
    client.execute_command("ACL", "SETUSER", "narrow", "reset", "on", *rules("worker", run=run_name).split())
    try:
        assert dry_run(client, "narrow", "HGETALL", keys.meta)  # type: ignore[arg-type]
        assert not dry_run(client, "narrow", "HGETALL", Keys(f"{run_name}-2").meta)  # type: ignore[arg-type]
    finally:
        client.execute_command("ACL", "DELUSER", "narrow")


def test_rules_for_6_2_need_no_selectors_and_allow_all_that_a_part_does(client: redis.Redis, keys: Keys) -> None:
    told: Any = client.command()
    arities = {name.upper(): about["arity"] for name, about in told.items()}
    for role in ROLES:
        told = rules(role, selectors=False)
        assert "(" not in told
        client.execute_command("ACL", "SETUSER", "old", "reset", "on", *told.split())
        try:
            assert not dry_run(client, "old", "FLUSHALL")  # type: ignore[arg-type]
            for kind, names in MAY_CHANGE[role].items():
                for name in names:
                    call = calls_of(name, arities[name], every_key(keys)[kind])
                    assert dry_run(client, "old", *call), (role, name, kind)  # type: ignore[arg-type]
        finally:
            client.execute_command("ACL", "DELUSER", "old")


def test_the_printed_file_of_users_is_one_that_a_server_starts_with(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.mkdir()
    for role in ROLES:
        (passwords / role).write_text(f"of-{role}\nnext-of-{role}\n")
    (passwords / "replica").write_text("of-replica\n")
    words = [sys.executable, "-m", "streamrl.ops.cli.main", "redis", "acl", "--passwords", str(passwords)]
    users = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "of-worker" not in users
    named = [line.split()[1] for line in users.splitlines()]
    assert named == ["default", *ROLES, "replica"], "of servers those that have a password"
    with EmbeddedRedis.start(tmp_path / "server") as server, connect(server.url, SETTINGS) as client:
        for line in reversed(users.splitlines()):  # the default user last, who says this
            _, name, *granted = line.split()
            client.execute_command("ACL", "SETUSER", name, *granted)
        for known in ("of-worker", "next-of-worker"):
            with connect(server.url.replace("unix://", f"unix://worker:{known}@"), SETTINGS) as worker:
                assert worker.execute_command("PING")
        with pytest.raises(ResourceError, match="STREAMRL_REDIS_PASSWORD_FILE"):
            connect(server.url, SETTINGS)
        socket = server.url.removeprefix("unix://")
        with redis.Redis(unix_socket_path=socket, username="replica", password="of-replica", protocol=2) as follower:
            assert follower.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                follower.info()
