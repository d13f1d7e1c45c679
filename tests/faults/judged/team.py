"""The parts of a judged run as real processes: the learner under torchrun, workers with a real engine, Redis.

Learner and workers reach Redis by a route each, with TLS up to the proxy; the judge and the operator have their own.
Ended parts are replaced, as by a supervisor. Blocks on what it starts and ends, within bounds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from streamrl.config import schema
from streamrl.process import dying_with_us
from streamrl.protocol.transport.acl import ROLES, rules
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import set_control
from streamrl.protocol.transport.types import Control
from tests.faults.agents import descendants, is_alive, named_ranks
from tests.faults.judge.books import Prompts
from tests.faults.judge.history import newest_checkpoint
from tests.faults.judged.kinds import MAX_LAG, REWARD, RUN, Kind, make
from tests.faults.judged.server import MortalRedis
from tests.faults.judged.tls import TlsRoad
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, learner_command
from tests.proxy import Proxy

NUM_WORKERS = 2
KEYS = Keys(RUN)
ENDS_WITHIN_S = 120.0
_WORDS_OF_ENDING = 600  # characters
_MISTAKE = 2  # exit code of a user's mistake, which a restart does not fix


class Process(Protocol):
    """The methods of `subprocess.Popen` that are used of a part."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Team:
    max_lag = MAX_LAG

    def __init__(self, kind: Kind, folder: Path, parts: ExitStack, *, seed: int) -> None:
        self.kind, self.folder, self.seed = kind, folder, seed
        # Otherwise a version is merged from more than the checkpoint has, or there are no tensors at all.
        self.publishes_masters = not (kind.lora or kind.light)
        self.config = self._make_config()
        users = [f"user {role} on >{role} {rules(role, run=RUN)}" for role in ROLES] if kind.tls else []
        self.server = MortalRedis(folder / "redis", users=users)
        parts.callback(self.server.kill)
        self.roads: dict[str, Proxy] = {}
        self._tls: dict[str, TlsRoad] = {}
        for role in ("learner", "worker"):
            road = self.roads[role] = parts.enter_context(Proxy(f"unix://{self.server.socket}", seed=seed))
            if kind.tls:
                socket = Path(road.url.removeprefix("unix://"))
                self._tls[role] = parts.enter_context(TlsRoad(socket, folder / f"tls-{role}"))
        parts.callback(self.end_all)
        self.endings: Counter[str] = Counter()  # of parts, by role and exit code
        self._num_started = 0
        self._all: list[Process] = []
        self.learner = self._start_learner()
        self.workers = [self._start_worker() for _ in range(NUM_WORKERS)]

    @property
    def run_folder(self) -> Path:
        return self.config.folder

    def tend(self) -> None:
        """Replace ended parts."""
        if self.learner.poll() is not None:
            self.endings[f"learner {self.learner.returncode}"] += 1
            self.learner = self._start_learner()
        for at, worker in enumerate(self.workers):
            if worker.poll() is not None:
                assert worker.returncode != _MISTAKE, f"a worker was started wrongly\n{self.last_words()}"
                self.endings[f"worker {worker.returncode}"] += 1
                self.workers[at] = self._start_worker()

    def ranks(self) -> list[int]:
        """The processes of the current ranks."""
        return sorted(named_ranks(self.learner.pid).values())

    def progress(self) -> tuple[int, int]:
        return newest_checkpoint(self.run_folder) or (0, 0)

    def say(self, word: Control) -> None:
        with self.server.client() as client:
            set_control(client, KEYS, word, by="the judge")

    def audit_words(self) -> list[str]:
        program = [sys.executable, "-m", "streamrl.ops.cli.main", "audit", str(self.run_folder)]
        return [*program, "--redis", self.server.url, "--json"]

    def drain(self) -> None:
        """Wait until everything issued has ended, then the learner, then the workers."""
        self.say("drain")

        def has_drained() -> bool:
            if self.learner.poll() == 0:
                return True
            self.tend()
            self.say("drain")
            return False

        wait_until(has_drained, description="the run has drained", timeout_s=ENDS_WITHIN_S, poll_s=0.5)
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait(ENDS_WITHIN_S)

    def last_words(self) -> str:
        logs = sorted(self.folder.glob("*.out"), key=lambda path: path.stat().st_mtime)[-3:]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-_WORDS_OF_ENDING:]}" for path in logs)

    def prompts(self) -> Prompts:
        return Prompts.read(self.folder / "prompts.jsonl", seed=self.seed, shuffle=True)

    def _make_config(self) -> schema.Config:
        return make(self.kind, self.folder, seed=self.seed)

    def _start_learner(self) -> Process:
        words = learner_command(self.config, self._url("learner"), processes=self.kind.ranks, max_restarts=100)
        return self._start("learner", words)

    def _start_worker(self) -> Process:
        words = [sys.executable, "-m", "workers", "--redis", self._url("worker"), "--run", RUN]
        words += [
            "--worker-id",
            f"w{self._num_started}",
            "--model",
            self.config.model.path,
            "--allow-reward-code",
            REWARD,
        ]
        return self._start("worker", words)

    def _url(self, role: str) -> str:
        return self._tls[role].url_of(role) if self._tls else self.roads[role].url

    def _start(self, role: str, words: Sequence[str]) -> Process:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **({"STREAMRL_REDIS_PASSWORD": role} if self.kind.tls else {}),
            "TMPDIR": str(self.folder),
        }
        self._num_started += 1
        with (self.folder / f"{role}-{self._num_started}.out").open("ab") as out:
            program = dying_with_us(words, by=signal.SIGKILL)
            process = subprocess.Popen(program, cwd=ROOT, env=environment, stdout=out, stderr=out)
        self._all.append(process)
        return process

    def end_all(self) -> None:
        """Kill what is left, with all processes below it."""
        left = [pid for process in self._all if process.poll() is None for pid in descendants(process.pid)]
        for pid in left:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self._all:
            process.wait(ENDS_WITHIN_S)
        wait_until(lambda: not any(map(is_alive, left)), description="nothing of the run is left")
