"""The overlay `cpu` as a cluster holds it: its pods by name, and what is asked of the run from outside of them.

Nothing is added to what the manifests say but settings that make the run a small one, in a file that extends the
overlay's own. Who asks is a pod, too: the image of the monitors, as the user `operator`, with the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers import wait_until
from tests.images.engine import Engine, command_lines
from tests.images.judged import Judge
from tests.images.outside import seconds_to_ready
from tests.images.pods import NODE, Pod
from tests.images.volumes import Volumes
from tests.manifest_world import COMPONENT, Object, Rendered
from tests.root.hosts import Hosts
from tests.scaling_world import metric

_OPERATOR = "operator"  # the host where it is asked
_POLL_S = 1.0
_SPY_S = 1.0
# What a page says; of a token only the file's name is in a word.
_GET = """
import sys, urllib.error, urllib.request as u
url, *files = sys.argv[1:]
headers = {"Authorization": f"Bearer {open(file).read()}" for file in files}
try:
    with u.urlopen(u.Request(url, headers=headers), timeout=10) as reply:
        print(reply.status, reply.read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


class Deployed:
    def __init__(self, engine: Engine, world: Hosts, rendered: Rendered, volumes: Volumes, logs: Path) -> None:
        self.volumes = volumes
        self._engine, self._world, self._rendered, self._logs = engine, world, rendered, logs
        self._lives: Counter[str] = Counter()
        self.pods: list[Pod] = []  # of all times
        self.found: set[str] = set()  # secrets, and where they were seen
        self._over = threading.Event()
        self._spy = threading.Thread(target=self._look, name="spy", daemon=True)
        with_tls = rendered.place["REDIS_SCHEME"] == "rediss"
        self.judge = Judge(world, rendered.place["RUN_NAME"], seen=volumes.folder / "seen.msgpack", with_tls=with_tls)
        volumes.fill_secrets()

    def open(self) -> None:
        self._spy.start()
        self.judge.start()

    def close(self) -> None:
        self._over.set()
        self.judge.stop()
        self._spy.join(timeout=60)
        for pod in self.pods:
            pod.forget()
        # The engine is every test's, and the next one has pods of the same names.
        self._engine.podman("rm", "--force", "--ignore", "--time", "0", *(pod.name for pod in self.pods))

    @property
    def run_folder(self) -> Path:
        return self.volumes.claim("runs") / self._rendered.place["RUN_NAME"]

    def start(self, component: str, host: str, images: Mapping[str, str] | None = None) -> Pod:
        """A pod of that workload. Of a StatefulSet it keeps its name when it is made anew, as its disk does."""
        workload = self._workload(component)
        self._lives[host] += 1
        name = host if workload["kind"] == "StatefulSet" else f"{host}-{self._lives[host]}"
        containers = {one.spec["name"]: one for one in self._rendered.containers()}
        made = Pod(self._engine, self._world, self.volumes, host=host, name=name, workload=workload, logs=self._logs)
        self.pods.append(made)
        made.start(containers, images or {})
        return made

    def anew(self, pod: Pod, images: Mapping[str, str] | None = None) -> Pod:
        """Deleted, and made again, as `kubectl rollout restart` does where there is no place for two."""
        pod.delete()
        made = self.start(pod.component, pod.host, images)
        made.wait_until_ready()
        return made

    def ready_outside_s(self, component: str, host: str, *, timeout_s: float) -> float:
        """Of the same command without image and container, with the same files; it is killed then."""
        self._lives[host] += 1
        name = f"{host}-outside-{self._lives[host]}"
        container = next(one for one in self._rendered.containers() if one.pod == component)
        container = replace(container, variables={**container.variables, "POD_NAME": name})
        laid = self.volumes.lay(self._workload(component)["spec"]["template"]["spec"], name)
        folder = self.volumes.folder / name
        return seconds_to_ready(self._world, host, container, laid, folder, timeout_s=timeout_s)

    # What is asked about the run

    def step(self) -> int:
        """The last that was made, in whichever life of the learner."""
        path = self.run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        made = (json.loads(line) for line in reversed(lines) if line.startswith("{") and line.endswith("}"))
        return next((int(line["step"]) for line in made if "train_optim/loss" in line), 0)

    def wait_for_steps(self, count: int, *, timeout_s: float) -> None:
        """So many more than now."""
        wanted = self.step() + count
        self.wait(lambda: self.step() >= wanted, description=f"step {wanted}", timeout_s=timeout_s)

    def has_weights(self) -> bool:
        """That a worker could load."""
        told = self.ask("status")
        return bool(told.get("weights", {}).get("latest"))

    def end_after(self, count: int) -> int:
        """The run's last step, so many after this one, for a learner that is started from now on."""
        last = self.step() + count
        changes = self.volumes.changes.replace("training: {", f"training: {{max_steps: {last}, ")
        self.volumes = replace(self.volumes, changes=changes)
        return last

    def wait(self, predicate: Any, *, description: str, timeout_s: float) -> None:
        def holds() -> bool:
            complaints = [line for pod in self.pods for line in pod.complaints]
            assert not complaints, complaints
            return bool(predicate())

        wait_until(holds, description=description, timeout_s=timeout_s, poll_s=_POLL_S)

    def page(self, url: str, *, token: str = "") -> tuple[int, str]:
        """(status, text), asked for by a node."""
        words = [sys.executable, "-I", "-S", "-c", _GET, url]
        if token:
            file = self.volumes.folder / "asked-with"
            file.write_text(token)
            words.append(str(file))
        done = self._world.ask(NODE, words, {})
        status, _, text = done.stdout.partition(" ")
        return int(status or 0), text

    def counted(self, pod: Pod, name: str) -> float:
        """Of a worker's figures; 0 where it is away."""
        _, text = self.page(f"http://{self._world.address(pod.host)}:9400/metrics")
        return metric(text, name) or 0.0

    def ask(self, *words: str) -> Any:
        """What a command of streamrl says with `--json`, as the operator's."""
        done = self.asked(*words, password=self.volumes.secret("redis-passwords", _OPERATOR))
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def asked(self, *words: str, password: str) -> subprocess.CompletedProcess[str]:
        files = self.volumes.folder / "operator"
        files.mkdir(exist_ok=True)
        (files / _OPERATOR).write_text(password)
        (files / "ca.crt").write_text(self.volumes.values.get(("redis-tls", "ca.crt"), ""))
        image = next(one.spec["image"] for one in self._rendered.containers() if one.pod == "monitor")
        space = self._world.space(_OPERATOR)
        told = ["run", "--rm", "--pull=never", "--network", f"ns:/run/netns/{space}", "--no-hosts"]
        told += ["--volume", f"/etc/netns/{space}/hosts:/etc/hosts:ro", "--volume", f"{files}:/run/secrets/redis:ro"]
        told += ["--volume", f"{files}:/run/secrets/redis-ca:ro"]
        told += ["--volume", f"{self.volumes.claim('runs')}:/runs:ro", "--cgroup-parent", f"/{self._engine.tag}"]
        told += ["--env", f"STREAMRL_REDIS_PASSWORD_FILE=/run/secrets/redis/{_OPERATOR}", image]
        place = self._rendered.place
        redis = ["--redis", f"{place['REDIS_SCHEME']}://{_OPERATOR}@{place['REDIS_SERVER']}{place['REDIS_OPTIONS']}"]
        run = ["--run", place["RUN_NAME"]]
        return self._engine.podman(*told, "streamrl", *words, *redis, *run, "--json", check=False)

    # Secrets

    def secrets_shown(self) -> list[str]:
        """Where a secret stands by its value: what was said, what was rendered, what the run keeps, what was seen."""
        texts = {f"log of {path.stem}": path.read_text(errors="replace") for path in self._logs.glob("*.log")}
        texts["the rendered objects"] = json.dumps(self._rendered.objects)
        kept = (path for path in self.volumes.claim("runs").rglob("*") if path.is_file())
        texts |= {str(path): path.read_bytes().decode(errors="replace") for path in kept}
        for pod in self.pods:
            inspected = self._engine.podman("container", "inspect", pod.name, check=False).stdout
            texts[f"podman inspect {pod.name}"] = inspected
        shown = {where for where, text in texts.items() for value in self.volumes.told if value in text}
        return sorted(shown | self.found)

    def _look(self) -> None:
        """At the command line and the environment of every process on the machine, again and again."""
        while not self._over.wait(_SPY_S):
            for pid, words in command_lines():
                texts = {"command line": words}
                with contextlib.suppress(OSError):
                    texts["environment"] = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                for kind, text in texts.items():
                    if any(value in text for value in tuple(self.volumes.told)):
                        self.found.add(f"{kind} of {words.split(chr(0))[0]}")

    def _workload(self, component: str) -> Object:
        return next(
            one
            for one in self._rendered.workloads
            if one["spec"]["template"]["metadata"]["labels"][COMPONENT] == component
        )


@contextlib.contextmanager
def deployed(engine: Engine, world: Hosts, rendered: Rendered, volumes: Volumes, logs: Path) -> Iterator[Deployed]:
    made = Deployed(engine, world, rendered, volumes, logs)
    try:
        made.open()
        yield made
    finally:
        made.close()
