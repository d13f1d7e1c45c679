"""Looking at one run again and again: for `top`, the dashboard and the exporter.

Blocks as long as the server takes, within the client's limits; TransportError when it does not answer. Who looks on
sees sooner than a clock could tell that a part has gone silent, and whatever other machines' clocks say.
"""

from __future__ import annotations

from collections.abc import Mapping

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
_RECENT = 400  # records that a view needs: for a curve one line high, and the pace


class Watcher:
    def __init__(self, client: redis.Redis, keys: Keys, *, server: str) -> None:
        self.history = History()
        self.view: View | None = None  # of the last time that Redis answered
        self._client, self._keys, self._server = client, keys, server
        self._liveness = Liveness()

    def look(self) -> View:
        seen = snapshot(self._client, self._keys, num_records=1, num_events=NUM_EVENTS, give_up_after_s=_PATIENCE_S)
        self.history.refresh(self._client, self._keys)
        ages: Mapping[str, float] = self._liveness.ages(seen.reports, at=seen.at)
        self.view = build_view(
            seen,
            run_name=self._keys.name,
            server=self._server,
            records=self.history.steps.records[-_RECENT:],
            ages=ages,
            silent_s=SILENT_S,
        )
        return self.view
