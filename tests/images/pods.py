"""A pod as kubelet runs one: init containers to their end, then its container, probed, restarted, told to end in time.

    start ─► startup probe ─► readiness, liveness ... ─► preStop, SIGTERM, the grace, SIGKILL

Each pod has a host of tests/root/hosts.py, that is a network namespace with an address and a name; probes come from the
host `node`. One thread a pod asks them and notes what kubelet would do: a probe that failed too often, an end
that nobody asked for (Deployments are started again at once, Jobs are not).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.helpers import wait_until
from tests.images.engine import Engine
from tests.images.volumes import Volumes, num_bytes, num_cores
from tests.manifest_world import COMPONENT, Container, Object
from tests.root.hosts import Hosts

NODE = "node"
_POLL_S = 0.5
_UNREADY_S = 1.0
_BACK_OFF_S, _MOST_BACK_OFF_S = 10.0, 300.0  # of a container that ends again; the first time it is started at once
_ASK = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read()"
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"


@dataclass(slots=True, kw_only=True)
class _Probe:
    spec: Object
    failures: int = 0  # one after the other
    due: float = 0.0

    @property
    def threshold(self) -> int:
        return int(self.spec.get("failureThreshold", 3))

    def is_due(self) -> bool:
        return time.monotonic() >= self.due

    def note(self, passed: bool, *, period_s: float | None = None) -> None:
        self.failures = 0 if passed else self.failures + 1
        self.due = time.monotonic() + (float(self.spec.get("periodSeconds", 10)) if period_s is None else period_s)


class Pod:
    def __init__(
        self, engine: Engine, world: Hosts, volumes: Volumes, *, host: str, name: str, workload: Object, logs: Path
    ) -> None:
        """`name`: of this life of the pod; its host stays when it is made anew."""
        self.host, self.name, self.workload = host, name, workload
        self._engine, self._world, self._volumes = engine, world, volumes
        self._log = logs / f"{name}.log"
        self._spec: Object = workload["spec"]["template"]["spec"]
        self._mounts: dict[str, Path] = {}
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep, name=f"kubelet {name}", daemon=True)
        self._container: Container | None = None
        self._pid = 0  # among podman's processes
        self._began = 0.0
        self.ready = threading.Event()
        self.ready_after_s = 0.0  # since its container was asked for
        self.restarts = 0
        self.complaints: list[str] = []  # what kubelet would have killed it for

    @property
    def component(self) -> str:
        return str(self.workload["spec"]["template"]["metadata"]["labels"][COMPONENT])

    def start(self, containers: Mapping[str, Container], images: Mapping[str, str]) -> None:
        """`images`: the one of each name in the manifests, where another shall run."""
        self._mounts = self._volumes.lay(self._spec, self.name, self.workload["spec"].get("volumeClaimTemplates", ()))
        for spec in self._spec.get("initContainers", ()):
            self._run(containers[spec["name"]], images, f"{self.name}-{spec['name']}", "--rm")
        self._volumes.let_in_judge(self._mounts)
        self._container = containers[self._spec["containers"][0]["name"]]
        self._began = time.monotonic()
        self._run(self._container, images, self.name, "--detach")
        self._note_process()
        self._watch.start()

    def delete(self) -> float:
        """Told to end, as by `kubectl delete pod`; seconds that it took. AssertionError when it had to be killed."""
        self.forget()
        assert self._container is not None
        hook = self._container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        began = time.monotonic()
        if hook:
            self._engine.podman("exec", self.name, *hook["command"])
        grace_s = int(self._spec.get("terminationGracePeriodSeconds", 30))
        self._engine.podman("stop", "--time", str(grace_s), self.name, timeout_s=grace_s + 60)
        took_s = time.monotonic() - began
        code = self.exit_code()
        self._engine.podman("rm", "--force", self.name)
        assert code != 137, f"{self.name} did not end within its {grace_s} s\n{self.log()[-3000:]}"
        return took_s

    def kill(self) -> None:
        """As when its node is lost: no last word."""
        self.forget()
        self._engine.podman("kill", "--signal", "KILL", self.name)
        self._engine.podman("rm", "--force", self.name)

    def forget(self) -> None:
        """Its probes end; its container goes on."""
        self._over.set()
        if self._watch.ident is not None:
            self._watch.join(timeout=60)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in its container."""
        return self._engine.podman("exec", self.name, *words, check=False)

    def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        wait_until(
            lambda: self.ready.is_set() or self.complaints,
            description=f"{self.name} is ready; it says why not in {self._log}",
            timeout_s=timeout_s,
            poll_s=_POLL_S,
        )
        assert not self.complaints, f"{self.complaints}\n{self.log()[-3000:]}"

    def exit_code(self) -> int | None:
        """None while it runs."""
        if self._engine.runs(self._pid):
            return None
        state = self._engine.inspect("container", self.name)["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # How it is started

    def _run(self, container: Container, images: Mapping[str, str], name: str, *words: str) -> None:
        told_by_cluster = {"POD_NAME": self.name, "POD_IP": self._world.address(self.host)}
        own = {name: told_by_cluster.get(name, value) for name, value in container.variables.items()}
        container = replace(container, variables=own)
        image = images.get(container.spec["image"], container.spec["image"])
        told = ["run", *words, "--name", name, "--pull=never", *self._place(), *self._rights(container)]
        told += [word for pair in own.items() for word in ("--env", "=".join(pair))]
        told += self._limits(container) + self._mounted(container)
        if command := container.spec.get("command"):
            told += ["--entrypoint", f'["{command[0]}"]']
        self._engine.podman(*told, image, *container.words[1 if command else 0 :], timeout_s=180)

    def _place(self) -> list[str]:
        space = self._world.space(self.host)
        names = ["--hostname", self.host, "--no-hosts", "--volume", f"{self._hosts_file(space)}:/etc/hosts:ro"]
        kept = ["--log-driver", "k8s-file", "--log-opt", f"path={self._log}", "--http-proxy=false"]
        return ["--network", f"ns:/run/netns/{space}", *names, *kept, "--cgroup-parent", f"/{self._engine.tag}"]

    def _hosts_file(self, space: str) -> Path:
        """The host's, with the pod's own names in front: for them nobody else is asked."""
        file = Path("/etc/netns") / space / "hosts"
        if aliases := self._spec.get("hostAliases"):
            lines = [f"{one['ip']} {' '.join(one['hostnames'])}\n" for one in aliases]
            text = "".join([*lines, file.read_text()])
            file = self._log.with_suffix(".hosts")
            file.write_text(text)
        return file

    def _rights(self, container: Container) -> list[str]:
        pod, own = self._spec["securityContext"], container.spec["securityContext"]
        assert pod["runAsNonRoot"]
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, "which is podman's, when nothing is said"
        told = ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--group-add", str(pod["fsGroup"])]
        told += [word for one in own["capabilities"]["drop"] for word in ("--cap-drop", one)]
        told += [word for one in own["capabilities"].get("add", ()) for word in ("--cap-add", one)]
        told += [] if own["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
        # podman would put folders of its own under /tmp and /run, which no pod has.
        return [*told, "--read-only", "--read-only-tmpfs=false"] if own["readOnlyRootFilesystem"] else told

    def _limits(self, container: Container) -> list[str]:
        asked, most = container.spec["resources"]["requests"], container.spec["resources"]["limits"]
        shares = max(2, int(1024 * num_cores(asked["cpu"])))
        told = ["--memory", str(num_bytes(most["memory"])), "--cpu-shares", str(shares)]
        return [*told, "--cpu-period", "100000", "--cpu-quota", str(int(100000 * num_cores(most["cpu"])))]

    def _mounted(self, container: Container) -> list[str]:
        told = []
        for mount in container.spec["volumeMounts"]:
            how = ":ro" if mount.get("readOnly") else ""
            told += ["--volume", f"{self._mounts[mount['name']]}:{mount['mountPath']}{how}"]
        return told

    # What kubelet does while it runs

    def _keep(self) -> None:
        try:
            self._watch_over()
        except (AssertionError, subprocess.TimeoutExpired) as error:  # podman's: the test must hear of it
            self.complaints.append(f"{self.name}: {error}")

    def _watch_over(self) -> None:
        assert self._container is not None
        spec = self._container.spec
        if "startupProbe" in spec and not self._has_begun(_Probe(spec=spec["startupProbe"])):
            return
        ready = _Probe(spec=spec["readinessProbe"]) if "readinessProbe" in spec else None
        alive = _Probe(spec=spec["livenessProbe"]) if "livenessProbe" in spec else None
        while not self._over.wait(_POLL_S) and not self._has_ended():
            self.complaints += self._volumes.overfull(self._spec, self._mounts, self.name)
            if ready and ready.is_due():
                # Asked more often than kubelet asks, until it passes: when that is, is measured.
                ready.note(self._passes(ready.spec), period_s=None if self.ready.is_set() else _UNREADY_S)
                if not ready.failures and not self.ready.is_set():
                    self.ready_after_s = time.monotonic() - self._began
                    self.ready.set()
            if alive and alive.is_due():
                alive.note(self._passes(alive.spec))
                if alive.failures >= alive.threshold:
                    self.complaints.append(f"{self.name}: its liveness probe failed {alive.failures} times")
                    return

    def _has_begun(self, probe: _Probe) -> bool:
        """Asked more often than kubelet asks, for no longer: when it passes is measured."""
        most_s = probe.threshold * float(probe.spec.get("periodSeconds", 10))
        while not self._over.wait(_POLL_S) and not self._has_ended():
            if probe.is_due():
                probe.note(self._passes(probe.spec), period_s=_UNREADY_S)
                if not probe.failures:
                    return True
                if time.monotonic() - self._began > most_s:
                    self.complaints.append(f"{self.name}: its startup probe never passed")
                    return False
        return False

    def _passes(self, probe: Object) -> bool:
        assert self._container is not None
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            return self.ask(*probe["exec"]["command"]).returncode == 0
        told: Mapping[str, Any] = probe.get("httpGet") or probe["tcpSocket"]
        ports = {one["name"]: one["containerPort"] for one in self._container.spec["ports"]}
        address, port = self._world.address(self.host), str(ports.get(told["port"], told["port"]))
        asked = [_ASK, f"http://{address}:{port}{told['path']}"] if "httpGet" in probe else [_CONNECT, address, port]
        words = [sys.executable, "-I", "-S", "-c", *asked, str(timeout_s)]
        return self._world.ask(NODE, words, {}).returncode == 0

    def _has_ended(self) -> bool:
        """A Job's has ended for good; others are started again."""
        code = self.exit_code()
        if code is None:
            return False
        if self._spec.get("restartPolicy") == "Never":
            return True
        self.ready.clear()
        back_off_s = min(_BACK_OFF_S * 2 ** (self.restarts - 1), _MOST_BACK_OFF_S) if self.restarts else 0.0
        self.restarts += 1
        if self._over.wait(back_off_s):
            return True
        self._began = time.monotonic()
        self._engine.podman("start", self.name)
        self._note_process()
        return False

    def _note_process(self) -> None:
        self._pid = int(self._engine.inspect("container", self.name)["State"]["Pid"])
