"""What causes are told from: who is there, who waits for what."""

from __future__ import annotations

from streamrl.ops.monitor.view import Part, View, Worker
from streamrl.telemetry.progress import Wait


def alive(view: View) -> list[Worker]:
    return [worker for worker in view.workers if worker.part.alive]


def waiting_for(view: View, wait: Wait) -> list[Worker]:
    """The workers that wait for this."""
    return [worker for worker in alive(view) if (worker.part.state, worker.part.doing) == ("waiting", wait)]


def rejecting(view: View) -> list[Worker]:
    """The workers whose engines did not prove that they serve what they were told to load; they deliver nothing."""
    return [worker for worker in alive(view) if worker.rejected]


def lead(view: View) -> Part | None:
    """Rank 0, when it reports."""
    part = view.learner.lead
    return part if part is not None and part.alive else None


def lead_waiting(view: View, *waits: Wait) -> Part | None:
    """Rank 0, when it waits for one of these."""
    part = lead(view)
    return part if part is not None and part.state == "waiting" and part.doing in waits else None


def is_running(view: View) -> bool:
    return view.run.state == "running"


def is_taken_up(view: View) -> bool:
    """A learner is on its way to a run that had ended, or that there is not yet: Redis will know once it has loaded."""
    part = lead(view)
    return (part is not None and part.state == "starting") or launching(view) is not None


def launching(view: View) -> Part | None:
    """A launcher whose learner has not taken the run yet. It has to import torch before it can report, and may fall
    silent while it does."""
    launchers = (part for part in view.others if part.role == "launcher" and part.alive)
    return next((part for part in launchers if part.state == "starting"), None)
