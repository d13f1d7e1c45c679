"""The pods of an overlay, each on a host of its own, as the manifests start them.

Words, variables, configuration, users of Redis and secrets are those of the rendered manifests; a pod's volumes lie in
the test's folder, and its paths lead there. Two things are added: settings that make the run a small one, and a socket
with a user of its own, by which the test looks at Redis without the network that it cuts.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from streamrl.config import schema
from streamrl.ops.audit import Audit, audit_folder
from streamrl.protocol.transport.acl import SERVERS
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import find_server
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.telemetry.progress import Report
from tests.helpers import wait_until
from tests.manifest_world import Container, Object, Rendered
from tests.root.hosts import Hosts

ADMIN = "admin"
REPLICA = "replica"  # a user that may replicate
_ROOT = Path(__file__).parents[2]
_READY_S = 120.0
_PATIENCE_S = 180.0
_POLL_S = 0.2  # what is waited for takes seconds, and two cores have better to do
_SHARED = "shared"  # by all pods: what a claim of a volume stands for


class Cluster:
    def __init__(self, world: Hosts, rendered: Rendered, folder: Path, *, changes: str) -> None:
        """`changes`: settings over those of the overlay, as a file of its own that extends it."""
        self.world = world
        self._rendered, self._folder, self._changes = rendered, folder, changes
        self._secrets: dict[tuple[str, str], str] = {}
        self.keys = Keys(rendered.place["RUN_NAME"])

    @property
    def volumes(self) -> Path:
        return self._folder / _SHARED

    @property
    def run_folder(self) -> Path:
        return self.volumes / "runs" / self.keys.name

    # Pods

    def start(self, name: str, host: str) -> subprocess.Popen[bytes]:
        """The container of that name, as the pod of the host's name."""
        container = self._container(name, host)
        mounts = self._mounts(container, host)
        words = [_placed(word, mounts) for word in container.words]
        return self.world.start(host, words, self._environment(container, mounts))

    def start_redis(self, host: str, *, replica_of: str | None = None) -> None:
        users = self._container("users", host)
        mounts = self._mounts(users, host)
        inside = self._environment(users, mounts)
        done = self.world.ask(host, [_placed(word, mounts) for word in users.words], inside)
        assert done.returncode == 0, done.stderr
        file = mounts["/run/acl"] / "users.acl"
        file.write_text(f"{file.read_text()}user {ADMIN} on nopass ~* &* +@all\n{_may_replicate()}\n")
        container = self._container("redis", host)
        mounts = self._mounts(container, host)
        program, *words = [_placed(word, mounts) for word in container.words]
        assert program == "valkey-server"
        words += ["--unixsocket", str(self._socket(host))]
        if replica_of:
            words += ["--replicaof", f"{replica_of} 6379", "--masteruser", REPLICA, "--masterauth", REPLICA]
            words += ["--repl-diskless-sync-delay", "0"]
        self.world.start(host, [str(find_server()), *words], {})
        with self.admin(host) as admin:
            wait_until(lambda: _is_serving(admin), description=f"Redis on {host} serves", timeout_s=_READY_S)

    def wait_until_ready(self, name: str, host: str) -> None:
        """By the readiness probe of its container, asked on its host."""
        container = self._container(name, host)
        probe = container.spec["readinessProbe"]["httpGet"]
        port = next(one["containerPort"] for one in container.spec["ports"] if one["name"] == probe["port"])
        ask = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}{probe['path']}', timeout=5).read()"
        words = [sys.executable, "-I", "-S", "-c", ask]
        wait_until(
            lambda: self.world.ask(host, words, {}).returncode == 0,
            description=f"{name} on {host} is ready",
            timeout_s=_READY_S,
            poll_s=1.0,
        )

    def streamrl(self, role: str, *words: str, host: str) -> subprocess.CompletedProcess[str]:
        """A command of streamrl about the run, from that host, as the user of a role."""
        environment = {**_inherited(), "STREAMRL_REDIS_PASSWORD": self._secret("redis-passwords", role)}
        target = ["--redis", f"redis://{role}@redis:6379", "--run", self.keys.name]
        return self.world.ask(host, ["streamrl", *words, *target], environment)

    # Looking, from outside of the network

    def admin(self, host: str) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket(host)), username=ADMIN, protocol=2, socket_timeout=5.0)

    def reports(self, host: str = "redis-0") -> dict[str, Report]:
        """What the parts last said of themselves, by host."""
        with connect(f"unix://{ADMIN}@{self._socket(host)}", schema.Redis()) as client:
            return {report.host: report for report in snapshot(client, self.keys).reports}

    def delivered(self, host: str) -> int:
        """Groups, by the worker there."""
        report = self.reports().get(host)
        return int(report.detail.get("groups_delivered", 0)) if report else 0

    def step(self) -> int:
        """The last that was made, in whichever life of the learner."""
        path = self.run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        made = (json.loads(line) for line in reversed(lines) if line.startswith("{") and line.endswith("}"))
        return next((int(line["step"]) for line in made if "train_optim/loss" in line), 0)

    def wait(self, predicate: Callable[[], object], *, description: str, timeout_s: float = _PATIENCE_S) -> float:
        """Until it holds; seconds that it took."""
        began = time.monotonic()
        wait_until(predicate, description=description, timeout_s=timeout_s, poll_s=_POLL_S)
        return time.monotonic() - began

    def wait_for_steps(self, count: int) -> float:
        """So many more than now."""
        wanted = self.step() + count
        return self.wait(lambda: self.step() >= wanted, description=f"step {wanted}")

    def ends_well(self, process: subprocess.Popen[bytes], host: str) -> None:
        self.wait(lambda: process.poll() is not None, description=f"what runs on {host} ends")
        assert process.returncode == 0, f"{host} ended with {process.returncode}\n{self.world.log(host)[-4000:]}"

    def audit(self, host: str = "redis-0") -> Audit:
        return audit_folder(self.run_folder, redis_url=f"unix://{ADMIN}@{self._socket(host)}")

    def denied(self, host: str = "redis-0") -> list[str]:
        """What Redis has refused to somebody, other than what docs/security.md says that it does."""
        with self.admin(host) as admin:
            found = [(entry["username"], entry["object"]) for entry in admin.acl_log()]
        return sorted({f"{user}: {what}" for user, what in found if what != "client|setinfo"})

    # A pod's files

    def _container(self, name: str, host: str) -> Container:
        found = self._rendered.container(name)
        return replace(found, variables={**found.variables, "POD_NAME": host})

    def _environment(self, container: Container, mounts: Mapping[str, Path]) -> dict[str, str]:
        own = {name: _placed(value, mounts) for name, value in container.variables.items()}
        return {**_inherited(), **own}

    def _mounts(self, container: Container, host: str) -> dict[str, Path]:
        """Where in the test's folder the pod's folders lie, with what its volumes say is in them."""
        volumes = {volume["name"]: volume for volume in container.template["spec"]["volumes"]}
        places = {
            mount["mountPath"]: self._place(volumes.get(mount["name"], {}), mount["name"], host)
            for mount in container.spec["volumeMounts"]
        }
        for path, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            name = next(mount["name"] for mount in container.spec["volumeMounts"] if mount["mountPath"] == path)
            for file, text in self._content(volumes.get(name, {})).items():
                (place / file).write_text(_placed(text, places))
        return places

    def _place(self, volume: Object, name: str, host: str) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.volumes / str(volume["persistentVolumeClaim"]["claimName"])
        return self._folder / host / name

    def _content(self, volume: Object) -> dict[str, str]:
        if "configMap" in volume:
            maps = self._rendered.of_kind("ConfigMap")
            files = next(dict(one["data"]) for one in maps if one["metadata"]["name"] == volume["configMap"]["name"])
            if "run.yaml" in files:
                files |= {"overlay.yaml": files["run.yaml"], "run.yaml": f"extends: overlay.yaml\n{self._changes}"}
            return files
        if "secret" in volume:
            secret = volume["secret"]["secretName"]
            keys = [item["key"] for item in volume["secret"].get("items", ())] or _KEYS[secret]
            return {key: self._secret(secret, key) for key in keys}
        return {}

    def _secret(self, secret: str, key: str) -> str:
        return self._secrets.setdefault((secret, key), secrets.token_hex(16))

    def _socket(self, host: str) -> Path:
        return self._folder / host / "redis.sock"


# What the README of k8s/ has people put into their secrets.
_KEYS: Mapping[str, Sequence[str]] = {
    "redis-passwords": ("worker", "learner", "monitor", "operator"),
    "reward-token": ("token",),
    "dashboard-token": ("token",),
}


def _placed(text: str, mounts: Mapping[str, Path]) -> str:
    """With the pod's paths as they lie in the test's folder."""
    longest_first = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    pattern = rf"(?<![\w./])({longest_first})(?![\w.-])"
    return re.sub(pattern, lambda found: str(mounts[found[1]]), text)


def _inherited() -> dict[str, str]:
    """What an image brings along; one thread each, since all hosts share this machine's cores."""
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(_ROOT)}
    return {**here, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _may_replicate() -> str:
    return f"user {REPLICA} on >{REPLICA} {SERVERS['replica']}"


def _is_serving(admin: redis.Redis) -> bool:
    try:
        state: Mapping[str, Any] = admin.info("replication")
    except redis.RedisError:
        return False
    return state["role"] == "master" or state["master_link_status"] == "up"
