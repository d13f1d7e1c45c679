"""Each cause that `streamrl why` can name, in a run that has it: a healthy view, and its changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamrl.ops.monitor.causes import TABLE, absent, not_begun, unreachable
from streamrl.ops.monitor.view import (
    Cause,
    Dead,
    Drops,
    LearnerStatus,
    Limits,
    PartStatus,
    RedisStatus,
    RewardSource,
    RunStatus,
    StreamStatus,
    View,
    WeightsStatus,
    WorkerStatus,
)
from streamrl.telemetry.progress import Wait

_GB = 10**9


def _part(name: str, doing: str, state: str = "waiting", for_s: float = 40.0, **changes: Any) -> PartStatus:
    role, _, place = name.partition("/")
    host = place.rpartition("-")[0] or "node-1"
    told = {"role": role, "host": host, "pid": 4711, "report_s": 0.4}
    return PartStatus(
        **{"name": name, "state": state, "doing": doing, "doing_s": for_s, "progress_s": for_s, **told, **changes}
    )


def _worker(doing: str = "generate", state: str = "working", for_s: float = 1.0, **changes: Any) -> WorkerStatus:
    told: dict[str, Any] = {"version": "1.120", "step": 120, "lag": 0, "tokens_per_s": 900.0, "leases": 8}
    rest: dict[str, Any] = {"in_flight": 32, "kv_use": 0.4, "delivered": 300, "failed": 0, "loads": 120}
    rest |= {"ended_lately": 100, "failed_lately": 0}
    last: dict[str, Any] = {"loads_in_flight": 110, "rejected": "", "rejected_version": "", "detail": {}}
    part = changes.pop("part", None) or _part("worker/node-2-77", doing, state, for_s)
    return WorkerStatus(**{"part": part, **told, **rest, **last, **changes})


_LEARNER = LearnerStatus(
    lead=_part("learner/0", "train", "working", 1.0),
    ranks=4,
    holder="node-1-4711",
    lease_left_s=25.0,
    metrics={"timers/step": 12.0, "timers/generate": 6.0},
    validation={},
    rewards=(),
    held_out={},
    step_s=12.0,
    is_new=False,
    skipped_lately=0,
    fresh_mismatch=(),
    live={},
)
_STREAM = StreamStatus(
    purpose="train",
    tickets=12,
    leased=8,
    groups=0,
    group_bytes=0,
    oldest_worker="node-2-77",
    oldest_s=20.0,
    oldest_silent_s=1.0,
    oldest_times=1,
)
WELL = View(
    at=1.0,
    run=RunStatus(
        name="big",
        uid="uid",
        state="running",
        control="run",
        term=1,
        step=120,
        max_steps=None,
        data_epochs=None,
        created_at=None,
        eta_s=None,
        share_done=None,
    ),
    limits=Limits(
        max_lag_steps=4,
        groups_per_step=16,
        max_backlog_bytes=2 * _GB,
        checkpoint_timeout_s=1800.0,
        arithmetic="bfloat16",
    ),
    learner=_LEARNER,
    workers=(_worker(),),
    others=(),
    restarts=0,
    rewards=(),
    streams=(_STREAM, replace(_STREAM, purpose="eval", tickets=40)),
    weights=WeightsStatus(
        latest="1.120",
        step=120,
        age_s=9.0,
        kept=6,
        num_bytes=None,
        largest_bytes=None,
        changed_share=None,
        published=121,
        behind=0,
        worst_lag=0,
    ),
    drops=Drops(trained=1920, dropped=80, by_reason={"zero_variance": 80}, rate_by_length={}, ignored={}),
    drops_lately=Drops(trained=800, dropped=30, by_reason={"zero_variance": 30}, rate_by_length={}, ignored={}),
    dead=Dead(count=0, retry_requests=0, latest=()),
    redis=RedisStatus(
        server="redis://host:6379",
        version="7.2",
        used_bytes=_GB,
        max_bytes=8 * _GB,
        policy="noeviction",
        role="master",
        save_error="",
    ),
)


def _run(**changes: Any) -> View:
    return replace(WELL, run=replace(WELL.run, **changes))


def _learner(doing: str, state: str = "waiting", for_s: float = 40.0, **changes: Any) -> LearnerStatus:
    return replace(_LEARNER, **{"lead": _part("learner/0", doing, state, for_s), **changes})


def _waiting(doing: str, **changes: Any) -> View:
    """The learner is in this wait."""
    return replace(WELL, learner=_learner(doing), **changes)


def _workers(*workers: WorkerStatus, **changes: Any) -> View:
    return replace(WELL, workers=workers, **changes)


def _stream(**changes: Any) -> tuple[StreamStatus, StreamStatus]:
    return replace(_STREAM, **changes), WELL.streams[1]


def _redis(**changes: Any) -> View:
    return replace(WELL, redis=replace(WELL.redis, **changes))


def _of_environment(**facts: int | float | str) -> dict[str, int | float | str]:
    return {f"rewards/environment/{name}": fact for name, fact in facts.items()}


_GONE = _part("worker/node-3-78", "generate", "silent", report_s=90.0)
_REJECTING = _worker(rejected="2 of 290 tensors read back are others than those loaded", rejected_version="1.120")
_DROPPED = Drops(trained=50, dropped=900, by_reason={"zero_variance": 890, "stale": 10}, rate_by_length={}, ignored={})
_TOO_LATE = "the environment failed in step: no answer within 10 s"
_LETTER = {"ticket": "812", "error": "reward right: ValueError: could not convert string to float: 'four'"}

VIEWS: Mapping[str, View] = {
    "redis_full": _redis(used_bytes=7_900_000_000),
    "redis_refuses_writes": _redis(save_error="the last background save failed"),
    "redis_read_only": _redis(role="slave"),
    "redis_evicts": _redis(policy="allkeys-lru"),
    "finished": _run(state="finished"),
    "failed": _run(state="failed", error="no group came for 1800 s"),
    "stopped": _run(state="stopped"),
    "crashed": _run(state="crashed", ended_at=-3600.0, folder="runs/big"),
    "paused": _run(control="pause"),
    "ending": _run(control="drain"),
    "learner_gone": replace(WELL, learner=replace(_LEARNER, lead=None, holder=None)),
    "learner_restarting": replace(WELL, learner=replace(_LEARNER, lead=None)),
    "lease_held": _waiting(Wait.LEASE),
    "learner_starting": replace(WELL, learner=_learner("load the model", "starting")),
    "publish_stuck": _waiting(Wait.WEIGHTS),
    "learner_stuck": replace(WELL, learner=_learner("train", "working", 600.0)),
    "saving": replace(WELL, learner=_learner("checkpoint", "working", 150.0)),
    "no_workers": _workers(),
    "all_workers_reject": _workers(_REJECTING),
    "reward_outage": _workers(
        _worker(Wait.REWARDS, "waiting", 30.0),
        rewards=(
            RewardSource(name="judge", mean=0.5, latency_s=None, scored=900, errors=7, state="0 of 1 replicas well"),
        ),
    ),
    "environment_fails": _workers(_worker(detail=_of_environment(ended_lately=100, failed_lately=36, error=_TOO_LATE))),
    "workers_starting": _workers(_worker(Wait.ENGINE, "waiting", 40.0)),
    "workers_without_hosts": _workers(
        _worker(Wait.HOSTS, "waiting", 40.0, detail={"hosts": 1, "hosts_wanted": 2, "hosts_at": "0.0.0.0:9600"})
    ),
    "workers_without_weights": _workers(_worker(Wait.WEIGHTS, "waiting", 40.0)),
    "workers_stuck": _workers(_worker(for_s=400.0, tokens_per_s=0.0)),
    "byte_budget_reached": _waiting(Wait.GROUPS, streams=_stream(tickets=0, groups=50_000, group_bytes=2_500_000_000)),
    "checkpoints_refused": replace(WELL, learner=_learner("train", "working", 0.0, live={"checkpoint/refused": 2.0})),
    "draws_refused": replace(
        WELL,
        learner=_learner(Wait.GROUPS, live={"curriculum/refused": 40.0}),
        streams=_stream(tickets=0),
    ),
    "all_groups_dropped": replace(
        WELL,
        learner=_learner(Wait.GROUPS, for_s=400.0, live={"stream/groups_dropped": 900.0}),
        drops=replace(_DROPPED, trained=1920),
    ),
    "poison_ticket": replace(WELL, streams=_stream(oldest_times=4, oldest_s=600.0)),
    "failing_tickets": _workers(
        _worker(ended_lately=6, failed_lately=6), dead=Dead(count=0, retry_requests=0, latest=(_LETTER,))
    ),
    "stragglers": _waiting(Wait.STRAGGLERS, streams=_stream(oldest_s=600.0)),
    "lag_bound_reached": _workers(_worker(Wait.TICKETS, "waiting", 30.0), streams=_stream(tickets=0, groups=80)),
    "environment_is_slow": _waiting(
        Wait.GROUPS,
        workers=(_worker(in_flight=2, detail=_of_environment(under_way=32, oldest_s=48.0, latency_s=41.0)),),
    ),
    "rewards_are_slow": replace(
        WELL,
        learner=_learner(Wait.GROUPS, metrics={"timers/generate": 6.0, "timers/reward": 90.0}),
        rewards=(RewardSource(name="judge", mean=0.5, latency_s=45.0, scored=900, errors=0, state="well"),),
        streams=_stream(leased=12),
    ),
    "generation_is_slow": _waiting(Wait.GROUPS),
    "evaluating": _waiting(Wait.EVALUATION),
    "most_groups_dropped": replace(WELL, drops_lately=_DROPPED),
    "few_prompts_fit": replace(WELL, prompts={"new": 40, "fitting": 60, "solved": 700, "hopeless": 240}),
    "some_workers_reject": _workers(_REJECTING, _worker(part=_part("worker/node-3-78", "generate", "working"))),
    "peer_lied": _workers(
        _worker(detail={"peers": "10.0.0.7:9500", "peer_lied": "10.0.0.8:9500"}),
        _worker(part=_part("worker/node-3-78", "generate", "working"), detail={"peers": "10.0.0.8:9500"}),
    ),
    "weights_behind": _workers(_worker(version="1.109", step=109, lag=11)),
    "engine_disagrees": replace(WELL, learner=replace(_LEARNER, fresh_mismatch=(1.8, 1.9, 2.0))),
    "validation_ranks_nothing": replace(
        WELL,
        learner=replace(
            _LEARNER,
            validation={
                "val_rollouts/num_prompts": 199.0,
                "val_rollouts/num_unanswered": 57.0,
                "val_rollouts/ranks": 0.0,
            },
        ),
    ),
    "workers_silent": _workers(_worker(), _worker(part=_GONE)),
    "dead_letters": replace(WELL, dead=Dead(count=3, retry_requests=0, latest=(_LETTER,))),
    "steps_skipped": replace(WELL, learner=replace(_LEARNER, skipped_lately=2)),
    "unreadable": replace(WELL, unreadable=("the report of worker/x: no such state: 'napping'",)),
}


def causes() -> dict[str, list[Cause]]:
    """The causes found in each made-up run, by name; first those that are not in the table."""
    found = {
        "redis_unreachable": [unreachable("redis://host:6379: connection refused")],
        "absent": list(absent(_run(state="absent"), was_removed=False)),
        "not_begun": list(not_begun(_run(state="absent", folder="runs/big"))),
    }
    return {**found, **{name: list(look(VIEWS[name])) for name, look in TABLE.items()}}
