"""k8s/components/redis-sentinel: one service of as many servers and Sentinels as there are, and what starts them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from streamrl.protocol.transport.acl import SERVERS
from streamrl.protocol.transport.clients import open_client, server_name
from tests.manifest_world import K8S, Rendered, render

FOLDER = K8S / "components" / "redis-sentinel"
SENTINELS = ["sentinel-0", "sentinel-1", "sentinel-2"]


@pytest.fixture
def rendered() -> Rendered:
    return render("cpu-sentinel")


def test_every_part_asks_every_sentinel_by_an_address_that_streamrl_takes(rendered: Rendered) -> None:
    named = [
        word.removeprefix("--redis=")
        for container in rendered.containers()
        for word in container.words
        if word.startswith("--redis=")
    ]
    assert len(named) == 4
    hosts = ",".join(f"{name}.sentinel:26379" for name in SENTINELS)
    for url in named:
        assert re.fullmatch(rf"redis\+sentinel://\w+@{hosts}/redis/0", url)
        with open_client(url, environment={}) as client:
            assert server_name(client) == "service redis of its sentinels"


def test_two_of_three_sentinels_choose_between_two_servers(rendered: Rendered) -> None:
    pods = [*rendered.names_of_pods()]
    assert sorted(pods) == ["redis-0", "redis-1", *SENTINELS]
    assert ' 6379 2"' in (FOLDER / "sentinel.sh").read_text()
    for name in ("redis", "sentinel"):
        service = rendered.named("Service", name)["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True), "found before it is ready"
        assert rendered.named("StatefulSet", name)["spec"]["serviceName"] == name


def test_a_sentinel_has_the_rights_of_every_other_pod(rendered: Rendered) -> None:
    """Those are added to whatever is in the base, which it is not."""
    ours, redis = (rendered.container(name).template["spec"] for name in ("sentinel", "redis"))
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks", "priorityClassName"):
        assert ours[key] == redis[key]
    assert ours["containers"][0]["securityContext"] == redis["containers"][0]["securityContext"]


def test_the_readme_has_people_make_the_passwords_of_servers() -> None:
    readme = (K8S / "README.md").read_text()
    assert all(f"--from-file={name}" in readme for name in SERVERS)


# What starts them, on programs that say what they were called with


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("bin", "data", "config", "secrets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secrets" / "sentinel").write_text("first\nsecond")
    program(tmp_path, "valkey-server", 'echo "$@"')
    program(tmp_path, "valkey-cli", "exit 1")
    moved = {"/etc/redis": "config", "/etc/sentinel": "config", "/run/secrets/redis": "secrets", "/data": "data"}
    for file in FOLDER.iterdir():
        text = file.read_text()
        for path, folder in moved.items():
            text = text.replace(f"{path}/", f"{tmp_path / folder}/")
        (tmp_path / "config" / file.name).write_text(text)
    return tmp_path


def program(place: Path, name: str, text: str) -> None:
    file = place / "bin" / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def sentinels_say(place: Path, master: str) -> None:
    """The last of them; the first does not answer, the second does not know."""
    program(
        place,
        "valkey-cli",
        f'case "$2" in sentinel-2*) echo {master}; echo 6379 ;; sentinel-1*) echo ;; *) exit 1 ;; esac',
    )


def starts(place: Path, script: str, pod: str, words: Sequence[str] = ()) -> list[str]:
    environment = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "POD_NAME": pod}
    done = subprocess.run(
        ["sh", str(place / "config" / script), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(("pod", "follows"), [("redis-0", []), ("redis-1", ["--replicaof", "redis-0.redis", "6379"])])
def test_at_the_first_start_the_first_server_is_the_master(place: Path, pod: str, follows: list[str]) -> None:
    told = starts(place, "redis.sh", pod, ["redis.conf", "--maxmemory", "6gb"])
    assert told[: 3 + len(follows)] == ["redis.conf", "--maxmemory", "6gb", *follows]
    assert ("--replicaof" in told) == bool(follows)
    assert told[told.index("--replica-announce-ip") + 1] == f"{pod}.redis"


@pytest.mark.parametrize(("pod", "follows"), [("redis-0", True), ("redis-1", False)])
def test_later_it_is_the_one_that_the_sentinels_say(place: Path, pod: str, follows: bool) -> None:
    (place / "data" / "appendonlydir").mkdir()
    sentinels_say(place, "redis-1.redis")
    told = starts(place, "redis.sh", pod)
    assert ("--replicaof" in told) == follows
    if follows:
        assert told[told.index("--replicaof") + 1 :][:2] == ["redis-1.redis", "6379"]


def test_a_server_that_has_data_waits_for_a_sentinels_word(place: Path) -> None:
    """It might follow one that has less."""
    (place / "data" / "appendonlydir").mkdir()
    asked = place / "asked"
    program(place, "valkey-cli", f'echo "$2" >> {asked}; if [ -e {place}/slept ]; then echo redis-1.redis; fi')
    program(place, "sleep", f"touch {place}/slept")
    assert "--replicaof" not in starts(place, "redis.sh", "redis-1")
    assert asked.read_text().split() == [*(f"{name}.sentinel" for name in SENTINELS), "sentinel-0.sentinel"]


def test_a_sentinel_keeps_what_it_has_learnt_and_takes_what_it_is_told_anew(place: Path) -> None:
    file = place / "data" / "sentinel.conf"
    assert starts(place, "sentinel.sh", "sentinel-0") == [str(file), "--sentinel"]
    assert "sentinel monitor redis redis-0.redis 6379 2" in file.read_text().splitlines()
    assert file.stat().st_mode & 0o777 == 0o600

    learnt = ["sentinel monitor redis redis-1.redis 6379 2", f"sentinel myid {'a' * 40}", "sentinel current-epoch 3"]
    learnt += ["sentinel known-replica redis redis-0.redis 6379", "sentinel config-epoch redis 3"]
    forgotten = ["sentinel auth-pass redis old", 'sentinel sentinel-pass "old"', "user sentinel on #0 -@all", "port 1"]
    file.write_text("\n".join([*forgotten, *learnt]))
    starts(place, "sentinel.sh", "sentinel-0")
    lines = file.read_text().splitlines()
    assert set(learnt) <= set(lines)
    assert not set(forgotten) & set(lines)
    assert {"sentinel auth-pass redis first", "sentinel sentinel-pass first"} <= set(lines)
    (user,) = [line for line in lines if line.startswith("user sentinel ")]
    assert user.startswith("user sentinel on >first >second resetchannels"), "one takes the place of the other"


def test_a_sentinel_that_has_lost_its_disk_asks_the_others(place: Path) -> None:
    sentinels_say(place, "redis-1.redis")
    starts(place, "sentinel.sh", "sentinel-0")
    assert "sentinel monitor redis redis-1.redis 6379 2" in (place / "data" / "sentinel.conf").read_text()


def test_the_component_is_laid_over_cpu_and_nothing_else() -> None:
    told = yaml.safe_load((K8S / "overlays" / "cpu-sentinel" / "kustomization.yaml").read_text())
    assert (told["resources"], told["components"]) == (["../cpu"], ["../../components/redis-sentinel"])
