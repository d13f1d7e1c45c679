"""KEDA beside pods: what it would have, by the page of the monitor's pod, at each of its polls.

    monitor's pod ── /metrics ──► triggers, formula (tests/scaling_world.py) ──► workers, by a clock on the wall

Nobody is started or ended here: who runs the pods does what it says. A thread of its own polls.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.images.deployed import Deployed
from tests.scaling_world import Keda


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    at: float
    value: float | None  # None: the page could not be had, or Redis could not
    workers: int


class Scaler:
    def __init__(self, namespace: Deployed) -> None:
        (scaler,) = namespace.volumes.rendered.of_kind("ScaledObject")
        self._namespace, self._keda = namespace, Keda(scaler["spec"])
        # Of every trigger the same, without the name that only a cluster's own servers know.
        url = str(scaler["spec"]["triggers"][0]["metadata"]["url"])
        self._url = url.replace(".streamrl.svc.cluster.local", "")
        self.polls: list[Poll] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="KEDA", daemon=True)

    @property
    def workers(self) -> int:
        return self.polls[-1].workers if self.polls else 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=60)

    def _poll(self) -> None:
        while True:
            status, page = self._namespace.page(self._url)
            value = self._keda.value(page) if status == 200 else None
            now = time.monotonic()
            workers = self._keda.poll(now, self.workers, value)
            workers = self._keda.autoscaler.sync(now, workers, value)
            self.polls.append(Poll(at=now, value=value, workers=workers))
            if self._over.wait(self._keda.period_s):
                return
