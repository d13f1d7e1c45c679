"""The GPUs of a run on plain hosts: what the scripts of docs/hosts start shares none, but where it is one process."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from streamrl.interface import GLOO, gloo_towards, interface_of
from tests.helpers import wait_until

HOSTS = Path(__file__).parents[2] / "docs" / "hosts"
NAMES = {"RUN_NAME": "big", "MODEL": "/models/policy", "REWARD_MODEL": "/models/reward", "RUN_CONFIG": "run.yaml"}


def tools(folder: Path, **programs: str) -> str:
    """A PATH with these in front."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    what: str  # reward, learn, worker
    host: str
    gpus: frozenset[str]


def assert_apart(started: list[Started]) -> None:
    for one, other in combinations(started, 2):
        assert one.host != other.host or not one.gpus & other.gpus, (one, other)


def components(script: str) -> list[Mapping[str, int]]:
    """Of a heterogeneous job: what each asks for."""
    parts = script.split("#SBATCH hetjob")
    asked = ["\n".join(re.findall(r"^#SBATCH.*", part, re.MULTILINE)) for part in parts]
    return [{name: int(number) for name, number in re.findall(r"--([a-z-]+)=(\d+)", words)} for words in asked]


def by_slurm(line: str, asked: list[Mapping[str, int]]) -> list[Started]:
    """Who runs where by a line of srun, as Slurm gives GPUs out: to a step those of its nodes, or to each task some."""
    words = line.split()
    number = int(next(word for word in words if word.startswith("--het-group=")).partition("=")[2])
    group = asked[number]
    at = words.index("streamrl") + 1 if "streamrl" in words else None
    found = []
    for node in range(1 if "--nodes=1" in words else group["nodes"]):
        for task in range(1 if "--ntasks=1" in words else group["ntasks-per-node"]):
            each = group.get("gpus-per-task", 0)
            own = range(task * each, (task + 1) * each) if each else range(group["gpus-per-node"])
            gpus = frozenset(map(str, own)) if at is not None else frozenset()  # Redis takes none
            what = "redis" if at is None else words[at]
            found.append(Started(what=what, host=f"group{number}-{node}", gpus=gpus))
    return found


def test_slurm_gives_each_part_gpus_of_its_own(tmp_path: Path) -> None:
    told, script = tmp_path / "told", HOSTS / "slurm.sh"
    path = tools(tmp_path / "tools", srun=f'echo "$*" >> {told}', scontrol='echo "${3}-0"')
    nodes = {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": f"group{n}" for n in range(3)}
    nodes |= {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "3", "LEAST_LEARNERS": "2"}
    environment = {**NAMES, **nodes, "PATH": path, "STREAMRL_REDIS": "redis://host:6379"}
    subprocess.run(["bash", script], env=environment, cwd=tmp_path, check=True, timeout=240)
    wait_until(lambda: told.exists() and told.read_text().count("\n") == 3, description="all three have started")

    asked = components(script.read_text())
    lines = told.read_text().splitlines()
    started = [one for line in lines for one in by_slurm(line, asked)]
    assert {one.what for one in started} == {"reward", "learn", "worker"}
    assert len([one for one in started if one.what == "worker"]) == 32
    assert all(one.gpus for one in started)
    assert_apart(started)
    assert any("rewards.model.url=http://group2-0:5555" in line for line in lines)
    assert any("--allow-host group2-0:5555" in line for line in lines)
    assert any("--nodes 2:3 --rendezvous group0-0:29400" in line for line in lines)


def by_ssh(tmp_path: Path, count: int, **variables: str) -> list[Started]:
    told = tmp_path / "told"
    line = f'echo "$STUB_HOST $1 ${{CUDA_VISIBLE_DEVICES-all}}" >> {told}'
    path = tools(tmp_path / "tools", ssh='shift\nexport STUB_HOST=$1\nshift\neval "$*"', streamrl=line, sleep="")
    environment = {**NAMES, "PATH": path, "LEARNERS": "a b", "WORKERS": "c d", "REWARD": "e", **variables}
    environment |= {"STREAMRL_REDIS": "redis://host:6379"}
    subprocess.run(["bash", HOSTS / "ssh.sh", "run.yaml"], env=environment, cwd=tmp_path, check=True, timeout=240)
    wait_until(lambda: told.exists() and told.read_text().count("\n") == count, description="all have started")
    lines = [row.split() for row in told.read_text().splitlines()]
    return [Started(what=what, host=host, gpus=frozenset(gpus.split(","))) for host, what, gpus in lines]


@pytest.mark.parametrize(("each", "workers"), [("1", 16), ("4", 4)])
def test_the_ssh_script_starts_a_worker_for_each_gpu(tmp_path: Path, each: str, workers: int) -> None:
    started = by_ssh(tmp_path, workers + 3, GPUS="8", GPUS_A_WORKER=each)

    assert_apart(started)
    of_workers = [one for one in started if one.what == "worker"]
    assert [len(one.gpus) for one in of_workers] == [int(each)] * workers


def test_without_a_number_the_ssh_script_starts_one_worker_that_takes_what_there_is(tmp_path: Path) -> None:
    assert sorted((one.host, *one.gpus) for one in by_ssh(tmp_path, 5) if one.what == "worker") == [
        ("c", "all"),
        ("d", "all"),
    ]


def test_the_ssh_script_refuses_a_reward_server_where_gpus_are_taken(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        by_ssh(tmp_path, 0, GPUS="8", REWARD="c")


def test_gloo_takes_the_interface_that_leads_to_the_rendezvous() -> None:
    assert interface_of(ipaddress.ip_address("127.0.0.1")) == "lo"
    assert interface_of(ipaddress.ip_address("203.0.113.9")) is None
    assert gloo_towards("127.0.0.1:29400", {}) == {}  # the loopback leads to nobody else
    assert gloo_towards("no-such-host.invalid:29400", {}) == {}
    assert gloo_towards("203.0.113.9:29400", {GLOO: "eth7"}) == {}  # an operator has chosen


@pytest.mark.skipif(len(os.listdir("/sys/class/net")) < 2, reason="this host has no interface but the loopback")
def test_gloo_is_told_the_interface_of_the_way_out() -> None:
    found = gloo_towards("203.0.113.9:29400", {})
    assert set(found.values()) <= set(os.listdir("/sys/class/net")) - {"lo"}


def test_where_a_hosts_own_name_is_the_loopback_gloo_takes_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, asked = socket.getaddrinfo, []

    def by_etc_hosts(host: str, port: int, **kind: int) -> Any:
        asked.append(host)
        return resolve("127.0.1.1" if host in ("trainer-0", "localhost") else host, port, **kind)

    monkeypatch.setattr(socket, "getaddrinfo", by_etc_hosts)
    found = gloo_towards("trainer-0:29400", {})
    assert found == gloo_towards("192.0.2.1:9", {}), "of the default route, if there is one"
    assert asked == ["trainer-0", "192.0.2.1", "192.0.2.1"]
    assert gloo_towards("localhost:29400", {}) == {}
