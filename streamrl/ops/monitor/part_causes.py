"""Causes in a part of the run: learner or workers are missing, not ready, stuck, or cannot store their work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.ops.monitor.evidence import (
    alive,
    is_running,
    launching,
    lead,
    lead_publishing,
    lead_waiting,
    rejecting,
    reported,
    usual_step_s,
    waiting_for,
)
from streamrl.ops.monitor.view import Cause, PartStatus, View, WorkerStatus, attention, blocking, info
from streamrl.protocol.weights.rejected import REMEDY_OF_ALL
from streamrl.telemetry.progress import Wait
from streamrl.terminal import age, plural

_STUCK_S = 120.0  # in one activity without progress
_STORING_S = 30.0  # storing a version or a checkpoint; some seconds are normal, above all for the first
_STORED: Mapping[str, str] = {"checkpoint": "a checkpoint is", "export": "the finished model is"}  # by the activity
_MAX_NAMED = 3
_STUCK_STEPS = 10.0  # or for so many usual steps, where those take long
# A death degrades the run for so long: who looks every few minutes sees it, and a replacement can load its model. After
# that it is only mentioned, as long as its report is kept: one that was replaced must not hide what is wrong now.
_NEWS_S = 900.0
_WHILE_IT_LOADS = "wait while it loads the model and checkpoint; if this takes long, look at the end of its log"
_JOIN = "start one, on any machine: streamrl worker --redis URL --run NAME"


def learner_gone(view: View) -> Iterator[Cause]:
    seen = view.learner.lead
    reports = seen is not None and seen.state != "silent"
    if is_running(view) and not reports and not view.learner.holder and not launching(view):
        last = f"rank 0 last reported {age(seen.report_s)} ago" if seen else "no rank reports"
        yield blocking(
            title="the learner is gone",
            evidence=f"{last}, and its lease has expired",
            remedy="its log says why it ended, or that it cannot reach this Redis (network, password); if it ended, "
            "start it again (`streamrl up CONFIG`, or `streamrl learn`): it resumes from the last checkpoint",
        )


def learner_restarting(view: View) -> Iterator[Cause]:
    if is_running(view) and not lead(view) and view.learner.holder:
        yield blocking(
            title="the learner is restarting or has just died",
            evidence=f"{view.learner.holder} holds the run for another {age(view.learner.lease_left_s)}, "
            "but rank 0 does not report",
            remedy="wait: torchrun restarts its ranks from the last checkpoint; if this takes long, the learner's log "
            "says why, or that it cannot reach this Redis (network, password)",
        )


def lease_held(view: View) -> Iterator[Cause]:
    waiting = (part for part in view.others if part.alive and part.doing == Wait.LEASE)
    if part := lead_waiting(view, Wait.LEASE) or (None if lead(view) else next(waiting, None)):
        yield blocking(
            title="another learner holds the run",
            evidence=f"{part.name} on {part.host} has waited for {age(part.doing_s)}; "
            f"{view.learner.holder or 'somebody'} has the lease for another {age(view.learner.lease_left_s)}",
            remedy="stop one of the two; if the other is dead, this one takes over when the lease expires",
        )


def learner_starting(view: View) -> Iterator[Cause]:
    part = lead(view)
    if part and part.state == "starting":
        yield Cause(
            level="blocking" if part.progress_s > _STUCK_S else "info",
            title="the learner is starting",
            evidence=f"{part.doing}, for {age(part.doing_s)}",
            remedy=_WHILE_IT_LOADS,
        )
    elif part is None and (launcher := launching(view)):
        yield info(
            title="the learner is starting",
            evidence=f"`streamrl up` has run on {launcher.host} for {age(launcher.doing_s)}, and rank 0 does not "
            "report yet",
            remedy=_WHILE_IT_LOADS,
        )


def publish_stuck(view: View) -> Iterator[Cause]:
    if (part := lead_publishing(view)) and part.progress_s >= _STORING_S:
        yield blocking(
            title="new weights cannot be stored",
            evidence=f"the learner has tried for {age(part.progress_s)}; the newest version is "
            f"{view.weights.latest or 'none'}",
            remedy="free space in weights.store (Redis, disk or bucket); the learner's log has the error",
        )


def checkpoints_refused(view: View) -> Iterator[Cause]:
    """Training goes on, but a crash goes back to the last checkpoint, and groups are not freed until the next one."""
    if times := reported(view, "checkpoint/refused"):
        yield attention(
            title="checkpoints cannot be written",
            evidence=f"{plural(int(times), 'checkpoint')} in a row failed; after a crash the run would resume from the "
            "one before them",
            remedy="free space on the disk of the run's folder, or fix its permissions (the learner's log has the "
            "error, checkpoint not written); the next checkpoint is tried when it is due",
        )


def saving(view: View) -> Iterator[Cause]:
    """All ranks wait while files as large as the model are written, or while an earlier checkpoint still is."""
    part = lead(view)
    if part is None or part.state != "working" or part.doing not in _STORED or any(learner_stuck(view)):
        return
    if _stands_s(part) >= _STORING_S:
        yield info(
            title=f"{_STORED[part.doing]} being written",
            evidence=f"for {age(_stands_s(part))}; it may take {age(view.limits.checkpoint_timeout_s)} "
            "(checkpoint.timeout_s)",
            remedy="wait for it; if training waits for checkpoints often, keep the run's folder on a faster disk, or "
            "raise checkpoint.every_steps",
        )


def learner_stuck(view: View) -> Iterator[Cause]:
    part = lead(view)
    if part is None or part.state not in ("working", "stopping") or _stands_s(part) < _may_stand_s(view, part):
        return
    if part.doing == "train" and view.learner.is_new:
        yield info(
            title="the learner's first step takes long",
            evidence=f"{part.doing} for {age(_stands_s(part))}, since the learner's start",
            remedy="wait: it also compiles the model; if it hangs, the watchdog kills it, and torchrun restarts it",
        )
        return
    yield blocking(
        title="the learner makes no progress",
        evidence=f"{part.doing} for {age(_stands_s(part))}; a step usually takes {age(view.learner.step_s)}",
        remedy=f"inspect process {part.pid} on {part.host} (py-spy dump), its peers and its disk; "
        "the watchdog will kill it eventually, and torchrun restarts it",
    )


def _stands_s(part: PartStatus) -> float:
    """Return how long it has neither made progress nor waited; between two waits of a long one it does not stand."""
    return min(part.progress_s, part.doing_s)


def _may_stand_s(view: View, part: PartStatus) -> float:
    at_disk_s = view.limits.checkpoint_timeout_s if part.doing in _STORED else None
    return max(_STUCK_S, _STUCK_STEPS * usual_step_s(view), at_disk_s or 0.0)


def no_workers(view: View) -> Iterator[Cause]:
    if is_running(view) and not alive(view):
        gone = [worker.part for worker in view.workers]
        latest = min(gone, key=lambda part: part.report_s, default=None)
        last = f"; the last one, {latest.name}, reported {age(latest.report_s)} ago" if latest else ""
        yield blocking(
            title="there are no workers",
            evidence=f"{plural(view.train.tickets, 'ticket')} wait, and no worker reports{last}",
            remedy=_JOIN,
        )


def workers_starting(view: View) -> Iterator[Cause]:
    parts = [worker.part for worker in alive(view)]
    if not parts or any(part.state != "starting" and part.doing not in (Wait.ENGINE, Wait.RUN) for part in parts):
        return
    slowest = max(parts, key=lambda part: part.doing_s)
    yield Cause(
        level="info" if slowest.progress_s < _STUCK_S else "blocking",
        title="the workers are starting",
        evidence=f"all {len(parts)} of them; {slowest.name}: {slowest.doing}, for {age(slowest.doing_s)}",
        remedy="wait: engines take minutes to load large models; if this takes longer, see the worker's log",
    )


def workers_without_hosts(view: View) -> Iterator[Cause]:
    waiting = waiting_for(view, Wait.HOSTS)
    if not waiting:
        return
    longest = max(waiting, key=lambda worker: worker.part.doing_s)
    joined, wanted, address = (longest.detail.get(name, "?") for name in ("hosts", "hosts_wanted", "hosts_at"))
    more = f", and {plural(len(waiting) - 1, 'other worker')}" if len(waiting) > 1 else ""
    yield Cause(
        level="blocking" if len(waiting) == len(alive(view)) else "attention",
        title="a worker waits for the other hosts of its engine",
        evidence=f"{longest.part.name} on {longest.part.host} has {joined} of {wanted} hosts, for "
        f"{age(longest.part.doing_s)}{more}; the others join at {address}",
        remedy="on each missing host: streamrl worker --redis URL --run NAME --model MODEL --join HOST:PORT, with this "
        "worker's host and that port; if one was started, its log says why it did not join (not_joined)",
    )


def workers_without_weights(view: View) -> Iterator[Cause]:
    workers = alive(view)
    waiting = waiting_for(view, Wait.WEIGHTS)
    if not workers or len(waiting) < len(workers) or len(rejecting(view)) == len(workers):
        return
    longest = max(worker.part.doing_s for worker in waiting)
    yield blocking(
        title="the workers wait for weights",
        evidence=f"all {len(workers)} of them, for {age(longest)}; the newest version: {view.weights.latest or 'none'}",
        remedy="wait until the learner has started and published a version; if there is one, the workers' logs say why "
        "they cannot load it",
    )


def all_workers_reject(view: View) -> Iterator[Cause]:
    workers, refusing = alive(view), rejecting(view)
    if is_running(view) and refusing and len(refusing) == len(workers):
        yield blocking(
            title="all workers reject the weights",
            evidence=f"{f'all {len(workers)} of them' if len(workers) > 1 else 'the only one'}: {_refusals(refusing)}",
            remedy=f"{REMEDY_OF_ALL}. After some minutes the run ends by itself; started again, it resumes from its "
            "checkpoint",
        )


def some_workers_reject(view: View) -> Iterator[Cause]:
    workers, refusing = alive(view), rejecting(view)
    if is_running(view) and refusing and len(refusing) < len(workers):
        others_serve = any(worker.version and not worker.rejected for worker in workers)
        yield attention(
            title="some workers reject the weights",
            evidence=f"{len(refusing)} of {len(workers)} deliver nothing: {_refusals(refusing)}",
            remedy="others serve this version, so these workers' engine or machine is at fault (load_rejected in their "
            "logs; another image, GPU or --model?): end them, and start as many elsewhere"
            if others_serve
            else "wait for the other workers, which have not loaded it yet: if they serve it, this one's machine is at "
            "fault; if they reject it too, engine and learner disagree about this model",
        )


def _refusals(workers: list[WorkerStatus]) -> str:
    """Describe one rejection in full, since all are usually alike, and name a few others."""
    first, others = workers[0], [worker.part.name for worker in workers[1:_MAX_NAMED]]
    more = f" and {len(workers) - _MAX_NAMED} more" if len(workers) > _MAX_NAMED else ""
    too = f" (also {', '.join(others)}{more})" if others else ""
    return f"{first.part.name} on {first.part.host} rejects version {first.rejected_version}{too}: {first.rejected}"


def peer_lied(view: View) -> Iterator[Cause]:
    """A peer has sent wrong pieces, as long as it lives or is unknown."""
    by_address = {str(worker.detail["peers"]): worker.part for worker in view.workers if worker.detail.get("peers")}
    accusations = [
        (worker.part.name, str(worker.detail["peer_lied"])) for worker in alive(view) if "peer_lied" in worker.detail
    ]
    accusations = [
        (name, address) for name, address in accusations if address not in by_address or by_address[address].alive
    ]
    if is_running(view) and accusations:
        [name, address], num_others = accusations[0], len(accusations) - 1
        part = by_address.get(address)
        sender = f"{part.name} on {part.host}" if part else "no worker that reports"
        more = f" (and {num_others} more)" if num_others else ""
        yield attention(
            title="a peer sends wrong weights",
            evidence=f"{name}{more} received a piece from {address} ({sender}) that does not match the manifest",
            remedy="end that worker and test its host's memory, or find out what listens at that address and close "
            "the port to everything but workers; no wrong weights were served, and workers no longer ask this peer",
        )


def workers_stuck(view: View) -> Iterator[Cause]:
    workers = alive(view)
    took = view.learner.metrics
    limit = max(_STUCK_S, _STUCK_STEPS * (took.get("timers/generate", 0.0) + took.get("timers/reward", 0.0)))
    # Multi-turn rollouts may take longer than any limit here; see `environment_is_slow`.
    in_episodes = [worker.part for worker in workers if worker.detail.get("rewards/environment/under_way")]
    # Nobody knows how long an answer takes before the first one: an engine that generates is not stuck.
    idle = [worker for worker in workers if not worker.tokens_per_s]
    busy = [worker.part for worker in idle if worker.part.state == "working" and worker.leases]
    stuck = [part for part in busy if part.progress_s > limit and part not in in_episodes]
    if stuck:
        names = ", ".join(part.name for part in stuck[:3])
        yield Cause(
            level="blocking" if len(stuck) == len(workers) else "attention",
            title="workers make no progress",
            evidence=f"{len(stuck)} of {len(workers)} hold tickets and have finished nothing for {age(limit)}: {names}",
            remedy="end those processes: their tickets go to others, and nothing is lost; their logs say why",
        )


def weights_behind(view: View) -> Iterator[Cause]:
    workers, bound = alive(view), view.limits.max_lag_steps
    if bound is None:
        return
    behind = [worker for worker in workers if worker.lag is not None and worker.lag > bound + 1]
    if behind:
        worst = max(behind, key=lambda worker: worker.lag or 0)
        yield attention(
            title="workers serve old weights",
            evidence=f"{len(behind)} of {len(workers)} serve weights over {bound + 1} steps old; {worst.part.name} "
            f"serves {worst.version}, {worst.lag} steps behind {view.weights.latest}",
            remedy="check how long loading takes (version_loaded in the worker's log), the network to the weights' "
            "store, and weights.publish_every",
        )


def workers_silent(view: View) -> Iterator[Cause]:
    silent = sorted((worker.part for worker in view.workers if not worker.part.alive), key=lambda part: part.report_s)
    if silent and alive(view) and is_running(view):
        names = ", ".join(f"{part.name} ({age(part.report_s)})" for part in silent[:_MAX_NAMED])
        yield Cause(
            level="attention" if silent[0].report_s < _NEWS_S else "info",
            title="some workers have died or cannot reach Redis",
            evidence=f"{len(silent)} of {len(view.workers)} no longer report: {names}",
            remedy="start replacements if the others are too slow; tickets of the lost ones go to others when their "
            "leases expire",
        )
