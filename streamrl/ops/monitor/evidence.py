"""Helpers for causes: which parts are alive, and what they wait for."""

from __future__ import annotations

from streamrl.ops.monitor.view import PartStatus, View, WorkerStatus
from streamrl.telemetry.progress import Wait

SLOW_S = 60.0  # a wait of the learner for groups that counts as long
_SLOW_STEPS = 10.0  # or so many usual steps, where those take long


def alive(view: View) -> list[WorkerStatus]:
    return [worker for worker in view.workers if worker.part.alive]


def waiting_for(view: View, wait: Wait) -> list[WorkerStatus]:
    """The workers in this wait."""
    return [worker for worker in alive(view) if (worker.part.state, worker.part.doing) == ("waiting", wait)]


def rejecting(view: View) -> list[WorkerStatus]:
    """The workers whose engines did not prove that they serve what they loaded; they deliver nothing."""
    return [worker for worker in alive(view) if worker.rejected]


def reported(view: View, metric: str) -> float:
    """The learner's latest figure, of its last step or since; 0 if it has none."""
    return {**view.learner.metrics, **view.learner.live}.get(metric, 0.0)


def lead(view: View) -> PartStatus | None:
    """Rank 0, if it reports."""
    part = view.learner.lead
    return part if part is not None and part.alive else None


def lead_waiting(view: View, *waits: Wait) -> PartStatus | None:
    """Rank 0, if it is in one of these waits."""
    part = lead(view)
    return part if part is not None and part.state == "waiting" and part.doing in waits else None


def lead_publishing(view: View) -> PartStatus | None:
    """Rank 0, if training waits until a version of the weights is stored: in that wait, or between two attempts."""
    part = lead(view)
    if part is not None and (part.state, part.doing) == ("working", "publish") and _is_far_ahead(view):
        return part
    return lead_waiting(view, Wait.WEIGHTS)


def _is_far_ahead(view: View) -> bool:
    """Whether no further step may be made on the newest weights that workers can have."""
    newest, bound = view.weights.step, view.limits.max_lag_steps
    return newest is None or (bound is not None and view.run.step - newest > bound)


def usual_step_s(view: View) -> float:
    """Seconds that a step usually takes; 0 before the first one."""
    return view.learner.step_s or 0.0


def waits_long(view: View, part: PartStatus) -> bool:
    """Whether rank 0 has waited for groups much longer than a step takes."""
    return part.doing_s > max(SLOW_S, _SLOW_STEPS * usual_step_s(view))


def room_for_more(view: View) -> str:
    """What to set so that workers have more groups in flight."""
    if view.train.leased >= view.train.tickets:
        return "raise lag.max_steps, since all tickets are leased"
    return "raise worker.max_groups_in_flight"


def is_running(view: View) -> bool:
    return view.run.state == "running"


def is_taken_up(view: View) -> bool:
    """Return whether a learner is starting a run that has ended or does not exist yet; Redis learns it after
    loading."""
    part = lead(view)
    return (part is not None and part.state == "starting") or launching(view) is not None


def launching(view: View) -> PartStatus | None:
    """Return a launcher whose learner has not taken the run yet: it must import torch before it can report, and may be
    silent meanwhile."""
    launchers = (part for part in view.others if part.role == "launcher" and part.alive)
    return next((part for part in launchers if part.state == "starting"), None)
