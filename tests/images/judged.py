"""The judge of tests/faults beside a run in pods: it looks at Redis all the time, from within that pod's network.

Redis gives it a user of its own, which reads; nobody else in the namespace may read all that it compares. A thread that
speaks to Redis is in that network for good, so whoever asks does it in a thread that is thrown away.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from tests.faults.judge.books import Prompts, Rules, Verdict, judge
from tests.faults.judge.compare import disagreements
from tests.faults.judge.history import read_history
from tests.faults.judge.recorder import Recorder, look
from tests.root.hosts import Hosts

USER = "judge"
ACL = f"user {USER} on nopass ~* resetchannels -@all +@read +ping +select"
_CLONE_NEWNET = 0x40000000


class Judge:
    def __init__(self, world: Hosts, run: str, *, seen: Path, with_tls: bool) -> None:
        self._world, self._run = world, run
        self._host = "redis-0"
        # Whom it speaks to it knows by the network that it is in.
        self._tls: dict[str, Any] = (
            {"ssl": True, "ssl_cert_reqs": "none", "ssl_check_hostname": False} if with_tls else {}
        )
        self._recorder = Recorder(self._client, run, to=seen)

    def start(self) -> None:
        self._recorder.start()

    def stop(self) -> None:
        self._recorder.stop()

    def follow(self, host: str) -> None:
        """It looks at the Redis of that host from its next connection on."""
        self._host = host

    def verdict(self, run_folder: Path, prompts: Path, *, seed: int, max_lag: int) -> Verdict:
        """Of a run that has come to rest."""
        history = read_history(run_folder)
        record = self._recorder.stop()
        with ThreadPoolExecutor(1, "judge") as apart:
            record.final = apart.submit(self._look, history.run_uid).result(timeout=60)
        texts = [str(json.loads(line)["prompt"]) for line in prompts.read_text().splitlines()]
        rules = Rules(prompts=Prompts(texts=texts, seed=seed, shuffle=True), max_lag=max_lag)
        return judge(history, record, rules)

    def _look(self, run_uid: str) -> Any:
        with self._client() as client:
            return look(client, self._run, run_uid)

    def _client(self) -> redis.Redis:
        _enter(self._world.space(self._host))
        address = self._world.address(self._host)
        limits: dict[str, Any] = {"socket_timeout": 10.0, "socket_connect_timeout": 5.0}
        return redis.Redis(address, 6379, username=USER, protocol=2, **limits, **self._tls)


def say_otherwise(verdict: Verdict, audit: Mapping[str, Any]) -> list[str]:
    """What the judge finds wrong, and where the audit does not say the same."""
    return [str(one) for one in verdict.violations] + disagreements(verdict, audit)


def _enter(space: str) -> None:
    """This thread alone."""
    with open(f"/run/netns/{space}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), space)
