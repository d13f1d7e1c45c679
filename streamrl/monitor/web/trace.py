"""What only a watcher can tell, since nobody writes it down: what workers did over time, and which weights they served.

Bounded: the older half is thinned when there is too much of it. One thread adds while others read.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from streamrl.monitor.view import View, Worker

_MOST_SAMPLES = 600
_MOST_CHANGES = 200  # of one worker's version
_MOST_WORKERS = 60


class Trace:
    def __init__(self) -> None:
        self._doing: list[tuple[float, Counter[str]]] = []
        self._versions: dict[str, list[tuple[float, str]]] = {}
        self._every, self._skipped = 1, 0
        self._lock = threading.Lock()

    def add(self, view: View) -> None:
        with self._lock:
            self._add(view)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return self._to_json()

    def _add(self, view: View) -> None:
        self._skipped += 1
        if self._skipped >= self._every:
            self._skipped = 0
            self._doing.append((view.at, Counter(_cause(worker) for worker in view.workers)))
            if len(self._doing) > _MOST_SAMPLES:
                del self._doing[::2]
                self._every *= 2
        for worker in view.workers:
            if worker.version is not None and (worker.part.name in self._versions or self._has_room):
                changes = self._versions.setdefault(worker.part.name, [])
                if not changes or changes[-1][1] != worker.version:
                    changes.append((view.at, worker.version))
                    del changes[:-_MOST_CHANGES]

    def _to_json(self) -> dict[str, Any]:
        causes = sorted({cause for _, counts in self._doing for cause in counts})
        return {
            "idle": {
                "at": [at for at, _ in self._doing],
                "series": {cause: [counts[cause] for _, counts in self._doing] for cause in causes},
            },
            "versions": {name: list(changes) for name, changes in sorted(self._versions.items())},
        }

    @property
    def _has_room(self) -> bool:
        return len(self._versions) < _MOST_WORKERS


def _cause(worker: Worker) -> str:
    part = worker.part
    if part.state == "waiting":
        return f"waits for {part.doing}"
    return {"silent": "silent", "working": "works"}.get(part.state, part.state)
