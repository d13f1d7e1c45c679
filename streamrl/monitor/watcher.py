"""Looking at one run again and again: for `top`, the dashboard, the exporter and the launcher.

Blocks as long as the server takes, within the client's limits; TransportError when it does not answer. Who looks on
sees sooner than a clock could tell that a part has gone silent, and whatever other machines' clocks say.
"""

from __future__ import annotations

import redis

from streamrl.monitor.build import build_view
from streamrl.monitor.history import History
from streamrl.monitor.view import View
from streamrl.telemetry.liveness import Liveness
from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import snapshot

SILENT_S = 2.2  # parts report every second; shown as silent at once, taken for gone later
_PATIENCE_S = 0.5
NUM_EVENTS = 5  # of the journal: whatever an operator still says, why a run failed is among them


class Watcher:
    def __init__(self, client: redis.Redis, keys: Keys, *, server: str) -> None:
        self.history = History()
        self.view: View | None = None  # of the last time that Redis answered
        self._client, self._keys, self._server = client, keys, server
        self._liveness = Liveness()
        self._has_begun = False

    def look(self) -> View:
        seen = snapshot(self._client, self._keys, num_records=1, num_events=NUM_EVENTS, give_up_after_s=_PATIENCE_S)
        self.history.refresh(self._client, self._keys)
        self.view = build_view(
            seen,
            run_name=self._keys.name,
            server=self._server,
            history=self.history,
            ages=self._liveness.ages(seen.reports, at=seen.at),
            silent_s=SILENT_S,
        )
        self._has_begun |= self.view.run.state == "running"
        return self.view

    @property
    def is_over(self) -> bool:
        """The run was seen running, and is no more. What ended before we looked may be taken up any moment."""
        return self._has_begun and self.view is not None and self.view.run.state != "running"
