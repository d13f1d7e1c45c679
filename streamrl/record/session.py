"""One session of recording: from the tap to the files, until the run has ended or somebody says enough.

Blocks on Redis, in slices of a second, and on the disk. What went before the session ended is on the disk when `record`
returns, and at most a second's groups are not when the process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streamrl.record.tap import Tap
from streamrl.record.write import RecordingWriter

_SLICE_S = 1.0
_LOOK_BACK_EVERY_S = 5.0


def record(
    tap: Tap,
    writer: RecordingWriter,
    *,
    stopped: Callable[[], bool],
    follow: bool,
    show: Callable[[], None],
) -> None:
    """`follow=False`: only what is there now. `show` is called about once a second."""
    tap.after = writer.last_id
    looked_at = shown_at = time.monotonic()
    writer.append(tap.look_back())
    while not stopped():
        ended = not follow or tap.run_state() not in ("running", None)
        entries = tap.read(wait_s=0.0 if ended else _SLICE_S)
        writer.append(entries)
        now = time.monotonic()
        if now - looked_at >= _LOOK_BACK_EVERY_S:
            writer.append(tap.look_back())
            looked_at = now
        if now - shown_at >= _SLICE_S:
            writer.sync()
            show()
            shown_at = now
        if ended and not entries:
            break
    writer.append(tap.look_back())
    writer.sync()
