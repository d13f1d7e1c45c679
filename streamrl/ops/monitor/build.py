"""Builds a `View` from a snapshot. Pure; `causes` adds what holds the run back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.ops.monitor import lately, view
from streamrl.ops.monitor.causes import find_causes, judge
from streamrl.ops.monitor.fields import config_of, integer, limits_of, number, section
from streamrl.ops.monitor.history import HELD_OUT, History, thin
from streamrl.protocol.transport.keys import LEADER
from streamrl.protocol.transport.snapshot import Snapshot, StreamCounts
from streamrl.protocol.transport.types import Record
from streamrl.protocol.weights.rejected import rejects
from streamrl.telemetry.progress import GONE_S, Report
from streamrl.versions import show

_RECENT = 400  # steps that count as recent
_FRESH_STEPS = 20  # window for comparing engine and learner
WELL = "well"  # the state that workers report for a healthy reward source


def build_view(
    snapshot: Snapshot,
    *,
    run_name: str,
    server: str,
    history: History | None = None,
    ages: Mapping[str, float] | None = None,
    silent_s: float = GONE_S,
) -> view.View:
    """Build the view. `history`: by default from the snapshot's records. `ages`: how long ago parts last reported, from
    an observer (`Liveness`); by default from the server's clock."""
    config = config_of(snapshot)
    history = history or History.of(snapshot.records)
    steps = history.steps.records[-_RECENT:]
    parts = {
        report.part: _part(report, age_s=(ages or {}).get(report.part, snapshot.age_s(report)), silent_s=silent_s)
        for report in snapshot.reports
    }
    learner = _learner(snapshot, parts, history, steps)
    workers = tuple(_worker(r, parts[r.part], snapshot) for r in snapshot.reports if r.role == "worker")
    seen = view.View(
        at=snapshot.at,
        run=_run(snapshot, run_name, config, steps),
        limits=limits_of(config),
        learner=learner,
        workers=workers,
        others=tuple(part for part in parts.values() if part.role != "worker" and part.name != LEADER),
        restarts=sum(integer(r.detail, "restarts") or 0 for r in snapshot.reports if r.role == "launcher"),
        rewards=tuple(_rewards(config, learner.metrics, workers)),
        streams=tuple(_stream(purpose, counts) for purpose, counts in snapshot.streams.items()),
        weights=_weights(snapshot, steps, workers),
        drops=_drops({**learner.metrics, **learner.live}),
        # Rates of the whole run, which are no counters, have no growth.
        drops_lately=replace(_drops(lately.added(steps, learner.live)), rate_by_length={}),
        prompts=_prompts({**learner.metrics, **learner.live}),
        dead=view.Dead(
            count=snapshot.num_dead,
            retry_requests=snapshot.num_retry_requests,
            latest=snapshot.letters,
        ),
        redis=view.RedisStatus(
            server=server,
            version=snapshot.server.version,
            used_bytes=snapshot.used_memory_bytes,
            max_bytes=snapshot.max_memory_bytes,
            policy=snapshot.server.max_memory_policy,
            role=snapshot.server.role,
            save_error=snapshot.server.save_error,
        ),
        unreadable=snapshot.unreadable,
    )
    return with_verdict(seen, was_removed=snapshot.was_removed)


def with_verdict(seen: view.View, *, was_removed: bool = False) -> view.View:
    causes = find_causes(seen, was_removed=was_removed)
    return replace(seen, causes=causes, verdict=judge(seen, causes))


def _run(snapshot: Snapshot, name: str, config: Mapping[str, Any], steps: Sequence[Record]) -> view.RunStatus:
    info = snapshot.run
    step = max(snapshot.step, steps[-1].step if steps else 0)
    max_steps = integer(section(config, "training"), "max_steps") or -1
    max_epochs = integer(section(config, "training"), "max_epochs") or 1
    passes = steps[-1].values.get(lately.EPOCH) if steps else None
    # The run ends with its steps or with its data, whichever is first.
    shares = [step / max_steps] if max_steps > 0 else []
    shares += [passes / max_epochs] if passes is not None else []
    return view.RunStatus(
        name=name,
        uid=info.uid if info else None,
        state=info.state if info else "absent",
        control=snapshot.control,
        term=info.term if info else 0,
        step=step,
        max_steps=max_steps if max_steps > 0 else None,
        data_epochs=passes,
        created_at=snapshot.created_at,
        eta_s=lately.eta_s(steps, max_steps=max_steps, max_epochs=max_epochs)
        if info and info.state == "running"
        else None,
        share_done=min(1.0, max(shares)) if shares else None,
        error=_error(snapshot),
    )


def _error(snapshot: Snapshot) -> str | None:
    """Return the journal's error for a failed learner, if any."""
    info = snapshot.run
    if info is None or info.state != "failed":
        return None
    failures = (e for e in reversed(snapshot.events) if e.kind == "failed" and e.term == info.term)
    return next((str(event.detail.get("error", "")) for event in failures), None)


def _part(report: Report, *, age_s: float, silent_s: float) -> view.PartStatus:
    progress_s = max(0.0, report.at - report.last_progress) + age_s
    # A wait is re-entered every second or so to check for other events; it began at the last progress.
    doing_s = progress_s if report.state == "waiting" else max(0.0, report.at - report.since) + age_s
    return view.PartStatus(
        name=report.part,
        role=report.role,
        host=report.host,
        pid=report.pid,
        state="silent" if age_s > silent_s else report.state,
        doing=report.doing,
        doing_s=doing_s,
        progress_s=progress_s,
        report_s=age_s,
    )


def _learner(
    snapshot: Snapshot, parts: Mapping[str, view.PartStatus], history: History, steps: Sequence[Record]
) -> view.LearnerStatus:
    ranks = [part for part in parts.values() if part.name.startswith("learner/") and part.alive]
    details = (report.detail for report in snapshot.reports if report.part == LEADER)
    fresh = (record.values.get("policy/fresh_mismatch") for record in steps)
    return view.LearnerStatus(
        lead=parts.get(LEADER),
        ranks=len(ranks),
        holder=snapshot.holder,
        lease_left_s=snapshot.lease_left_s,
        metrics=steps[-1].values if steps else {},
        validation=history.validations.records[-1].values if history.validations.records else {},
        rewards=tuple(thin(history.curve("train_rollouts/rewards")[1])),
        held_out=_held_out(history),
        step_s=lately.step_s(steps),
        is_new=not steps or snapshot.run is None or steps[-1].term < snapshot.run.term,
        skipped_lately=lately.num_skipped(steps),
        fresh_mismatch=tuple(mismatch for mismatch in fresh if mismatch is not None)[-_FRESH_STEPS:],
        live={k: float(v) for k, v in next(details, {}).items() if "/" in k and not isinstance(v, str)},
    )


def _held_out(history: History) -> dict[str, tuple[float, ...]]:
    """Return the held-out curves by source; the weighted sum, `reward`, only if there are several sources."""
    names = {name for record in history.validations.records for name in record.values}
    sources = sorted(name for name in names if name.startswith(f"{HELD_OUT}/"))
    shown = sources if len(sources) == 1 else [*sources, *(names & {HELD_OUT})]
    return {name.rpartition("/")[2]: tuple(thin(history.curve(name)[1])) for name in shown}


def _worker(report: Report, part: view.PartStatus, snapshot: Snapshot) -> view.WorkerStatus:
    detail = report.detail
    step = number(detail, "step")
    rejected, rejected_version = rejects(detail)
    version = detail.get("version")
    # Leases use the worker's name without the prefix that its reports have.
    name = report.part.partition("/")[2]
    holders = [counts.leased_by for counts in snapshot.streams.values()]
    leases = sum(leased_by.get(name, 0) + leased_by.get(report.part, 0) for leased_by in holders)
    return view.WorkerStatus(
        part=part,
        version=show(version) if isinstance(version, int) else str(version) if version is not None else None,
        step=None if step is None else int(step),
        lag=None if step is None else max(0, snapshot.latest_version_step - int(step)),
        tokens_per_s=number(detail, "tokens_per_s"),
        in_flight=integer(detail, "in_flight"),
        kv_use=number(detail, "kv_used"),
        leases=leases,
        delivered=integer(detail, "groups_delivered") or 0,
        failed=integer(detail, "groups_failed") or 0,
        ended_lately=integer(detail, "groups_lately") or 0,
        failed_lately=integer(detail, "groups_failed_lately") or 0,
        loads=integer(detail, "loads") or 0,
        loads_in_flight=integer(detail, "loads_in_flight") or 0,
        rejected=rejected,
        rejected_version=rejected_version,
        detail=detail,
    )


def _rewards(
    config: Mapping[str, Any], metrics: Mapping[str, float], workers: Sequence[view.WorkerStatus]
) -> Iterable[view.RewardSource]:
    """Combine what live workers report as `rewards/<source>/<fact>`; those without reports of a source are skipped."""
    alive = [worker.detail for worker in workers if worker.part.alive]
    for name in (*section(config, "rewards"), *(["environment"] if config.get("environment") else [])):
        latencies = [s for d in alive if (s := number(d, f"rewards/{name}/latency_s")) is not None]
        states = sorted({str(d[key]) for d in alive if (key := f"rewards/{name}/state") in d}, key=WELL.__eq__)
        yield view.RewardSource(
            name=name,
            mean=metrics.get(f"train_rollouts/rewards/{name}"),
            latency_s=sum(latencies) / len(latencies) if latencies else None,
            scored=sum(integer(d, f"rewards/{name}/scored") or 0 for d in alive),
            errors=sum(integer(d, f"rewards/{name}/failed") or 0 for d in alive),
            state=states[0] if states else None,
            tokens=sum(tokens)
            if (tokens := [n for d in alive if (n := integer(d, f"rewards/{name}/tokens"))])
            else None,
        )


def _stream(purpose: str, counts: StreamCounts) -> view.StreamStatus:
    oldest = counts.oldest_lease
    return view.StreamStatus(
        purpose=purpose,
        tickets=counts.num_tickets,
        leased=counts.num_leased,
        groups=counts.num_groups,
        group_bytes=counts.num_group_bytes,
        oldest_worker=oldest.worker if oldest else None,
        oldest_s=oldest.issued_s if oldest else None,
        oldest_silent_s=oldest.silent_s if oldest else None,
        oldest_times=oldest.times_leased if oldest else None,
    )


def _weights(snapshot: Snapshot, steps: Sequence[Record], workers: Sequence[view.WorkerStatus]) -> view.WeightsStatus:
    latest = snapshot.latest_version
    sizes = [r.values["weights/num_bytes"] for r in steps if "weights/num_bytes" in r.values]
    lags = [worker.lag or 0 for worker in workers if worker.part.alive]
    return view.WeightsStatus(
        latest=show(latest) if latest is not None else None,
        step=snapshot.latest_version_step if latest is not None else None,
        age_s=max(0.0, snapshot.at - snapshot.latest_version_at) if snapshot.latest_version_at else None,
        kept=snapshot.num_versions_kept,
        num_bytes=sizes[-1] if sizes else None,
        largest_bytes=max(sizes, default=None),
        changed_share=steps[-1].values.get("weights/changed_fraction") if steps else None,
        published=snapshot.num_versions_published,
        behind=sum(lag > 0 for lag in lags),
        worst_lag=max(lags, default=0),
    )


def _drops(metrics: Mapping[str, float]) -> view.Drops:
    return view.Drops(
        trained=int(metrics.get("stream/groups_trained", 0)),
        dropped=int(metrics.get("stream/groups_dropped", 0)),
        by_reason={name: int(count) for name, count in _family(metrics, "stream/dropped/").items()},
        rate_by_length=_family(metrics, "stream/drop_rate_by_length/"),
        ignored={name: int(count) for name, count in _family(metrics, "stream/ignored/").items()},
    )


def _prompts(metrics: Mapping[str, float]) -> dict[str, int]:
    return {kind: int(count) for kind, count in _family(metrics, "curriculum/prompts/").items()}


def _family(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
