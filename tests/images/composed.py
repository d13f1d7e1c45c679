"""docker/compose.yaml as compose starts it: a container for each service, after what it waits for is well.

    users ─► redis ─► reward ─► worker            each: podman run, by the file's words; its check asked until it passes
                 └──► learner, monitor, dashboard

Each has a host of tests/root/hosts.py. What compose would do and podman's own `run` does not is here: variables, the
order, checks of health, secrets and folders as mounts, and Docker's tmpfs, which nothing in it may be executed from
unless the file says so.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.compose_file import FILE, interpolated
from tests.helpers import wait_until
from tests.images.engine import Engine
from tests.root.hosts import Hosts

Service = Mapping[str, Any]
_POLL_S = 1.0
_TMPFS = ("rw", "noexec", "nosuid", "nodev", "mode=1777")  # of Docker; podman's allows more


class Composed:
    def __init__(self, engine: Engine, world: Hosts, given: Mapping[str, str], logs: Path) -> None:
        """`given`: the file's variables."""
        self._engine, self._world, self._logs = engine, world, logs
        told = yaml.safe_load(interpolated(FILE.read_text(), given))
        self.services: Mapping[str, Service] = told["services"]
        self._secrets = {name: Path(one["file"]) for name, one in told["secrets"].items()}
        self._started: list[str] = []

    def up(self, *, ready_s: float) -> Mapping[str, float]:
        """Seconds until each was well; one container of each service."""
        took = {}
        for name in self._in_order():
            began = time.monotonic()
            self._run(name, self.services[name])
            self._wait(name, self.services[name], ready_s)
            took[name] = time.monotonic() - began
        return took

    def down(self) -> None:
        for name in reversed(self._started):
            self._engine.podman("rm", "--force", "--time", "0", name, check=False)

    def state(self, name: str) -> Mapping[str, Any]:
        told: Mapping[str, Any] = self._engine.inspect("container", name)
        return {"restarts": told["RestartCount"], **told["State"]}

    def wait_for_end(self, name: str, *, timeout_s: float) -> None:
        """For good: it does not come again."""
        wait_until(
            lambda: self.state(name)["Status"] == "exited",
            description=f"{name} ends; it says why not in {self._logs / name}.log",
            timeout_s=timeout_s,
            poll_s=_POLL_S,
        )

    def log(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _in_order(self) -> list[str]:
        """After all that it waits for."""
        ordered: list[str] = []
        while len(ordered) < len(self.services):
            ready = [
                name
                for name, service in self.services.items()
                if name not in ordered and set(service.get("depends_on", ())) <= set(ordered)
            ]
            assert ready, "services wait for each other"
            ordered += ready
        return ordered

    def _wait(self, name: str, service: Service, ready_s: float) -> None:
        check = service.get("healthcheck")
        if check is None and any(name in other.get("depends_on", ()) for other in self.services.values()):
            code = int(self._engine.podman("wait", name).stdout)  # whoever depends on it waits for its end
            assert code == 0, self.log(name)
        elif check:
            asked = check["test"]
            words = ["sh", "-c", asked] if isinstance(asked, str) else asked[1:]
            wait_until(
                lambda: self._engine.podman("exec", name, *words, check=False).returncode == 0,
                description=f"{name} is well; it says why not in {self._logs / name}.log",
                timeout_s=ready_s,
                poll_s=_POLL_S,
            )

    def _run(self, name: str, service: Service) -> None:
        told = ["run", "--detach", "--name", name, "--pull=never", *self._place(name), *_rights(service)]
        told += [word for one in service["tmpfs"] for word in ("--tmpfs", tmpfs(one))]
        told += [word for one in self._mounts(service) for word in ("--volume", one)]
        told += [word for pair in service.get("environment", {}).items() for word in ("--env", "=".join(pair))]
        if entrypoint := service.get("entrypoint"):
            told += ["--entrypoint", json.dumps(entrypoint)]
        command = service["command"]
        words = shlex.split(command) if isinstance(command, str) else command
        self._started.append(name)
        self._engine.podman(*told, service["image"], *words, timeout_s=180)

    def _place(self, name: str) -> list[str]:
        kept = ["--log-driver", "k8s-file", "--log-opt", f"path={self._logs / name}.log", "--http-proxy=false"]
        space = self._world.space(f"{name}-0")
        hosts = ["--no-hosts", "--volume", f"/etc/netns/{space}/hosts:/etc/hosts:ro"]
        return ["--network", f"ns:/run/netns/{space}", *hosts, *kept, "--cgroup-parent", f"/{self._engine.tag}"]

    def _mounts(self, service: Service) -> list[str]:
        """Paths of the file's own folder, as compose takes them."""
        told = []
        for one in service.get("volumes", ()):
            source, _, rest = one.partition(":")
            told.append(f"{(FILE.parent / source).resolve()}:{rest}")
        return told + [f"{self._secrets[one['source']]}:{one['target']}:ro" for one in service.get("secrets", ())]


def tmpfs(told: str) -> str:
    """As podman takes it: Docker's options, but for those whose contrary is told."""
    path, _, options = told.partition(":")
    own = [one for one in options.split(",") if one]
    return f"{path}:{','.join([*(one for one in _TMPFS if one.removeprefix('no') not in own), *own])}"


def _rights(service: Service) -> list[str]:
    assert service["security_opt"] == ["no-new-privileges:true"], "which podman writes otherwise"
    told = ["--user", service["user"], "--security-opt", "no-new-privileges"]
    told += ["--read-only", "--read-only-tmpfs=false"] if service["read_only"] else []
    told += [word for one in service["cap_drop"] for word in ("--cap-drop", one)]
    flags = {"mem_limit": "--memory", "shm_size": "--shm-size", "restart": "--restart"}
    return told + [word for key, flag in flags.items() if key in service for word in (flag, str(service[key]))]
