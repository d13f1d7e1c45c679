"""Causes in what is not trained: groups that are dropped, tickets that fail, prompts that teach nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.ops.monitor.evidence import SLOW_S, alive, lead_waiting, usual_step_s
from streamrl.ops.monitor.reward_causes import reward_outage
from streamrl.ops.monitor.view import Cause, View, attention, blocking
from streamrl.telemetry.progress import Wait
from streamrl.terminal import age, plural

_SLOW_STEPS = 5.0  # so many times the time of a usual step, without a step
_TIMES_POISON = 3  # workers that lost the same ticket
_HIGH_SHARE = 0.9
_ENOUGH_GROUPS = 64  # for a share to be meaningful
_REMEDIES: Mapping[str, str] = {  # by why groups are dropped
    "zero_variance": "all samples of a group get the same reward: set data.curriculum=true, choose prompts that are "
    "neither too easy nor too hard, raise sampling.num_samples or temperature, or set "
    "algorithm.drop_zero_variance=false",
    "stale": "groups are too old when they arrive: raise lag.max_steps or hard_limit_steps, add workers, "
    "or lower sampling.max_tokens",
    "wrong_model": "a worker serves another model or tokenizer: compare its --model with the run's",
    "non_finite": "losses are not finite: lower optimizer.lr, and check the rewards",
}


def all_groups_dropped(view: View) -> Iterator[Cause]:
    """All groups since the last step, long ago, were dropped. Many drops between steps are normal for a good model."""
    live, at_last_step = view.learner.live, view.learner.metrics
    batch, part = view.limits.groups_per_step, lead_waiting(view, Wait.GROUPS)
    if not live or not batch or part is None:
        return
    if part.progress_s < max(SLOW_S, _SLOW_STEPS * usual_step_s(view)):
        return
    dropped = live.get("stream/groups_dropped", 0.0) - at_last_step.get("stream/groups_dropped", 0.0)
    if dropped < 2 * batch:
        return
    reasons = {
        why: count - at_last_step.get(f"stream/dropped/{why}", 0.0) for why, count in view.drops.by_reason.items()
    }
    breakdown = ", ".join(
        f"{why} {count:.0f}" for why, count in sorted(reasons.items(), key=lambda item: -item[1]) if count
    )
    yield blocking(
        title="groups arrive, but all are dropped",
        evidence=f"{dropped:.0f} dropped since the last step, {age(part.progress_s)} ago; a step needs {batch}: "
        f"{breakdown}",
        remedy=_remedy_of_drops(max(reasons, key=lambda why: reasons[why], default="")),
    )


def most_groups_dropped(view: View) -> Iterator[Cause]:
    drops = view.drops_lately
    total = drops.trained + drops.dropped
    if total >= _ENOUGH_GROUPS and drops.dropped >= _HIGH_SHARE * total:
        worst = max(drops.by_reason, key=lambda why: drops.by_reason[why], default="")
        yield attention(
            title="most groups are dropped",
            evidence=f"{drops.dropped} of the last {total}; most frequent reason: {worst or 'unknown'}",
            remedy=_remedy_of_drops(worst),
        )


def _remedy_of_drops(reason: str) -> str:
    return _REMEDIES.get(reason, "look at such groups in the learner's log and with `streamrl groups tail`")


def few_prompts_fit(view: View) -> Iterator[Cause]:
    """The curriculum has too few prompts to choose from."""
    found = view.prompts
    tried = sum(count for kind, count in found.items() if kind != "new")
    useless = found.get("solved", 0) + found.get("hopeless", 0)
    if tried >= _ENOUGH_GROUPS and useless >= _HIGH_SHARE * tried and found.get("new", 0) < tried:
        yield attention(
            title="few prompts are left to learn from",
            evidence=f"of {tried} prompts tried so far, {found.get('solved', 0)} are solved and "
            f"{found.get('hopeless', 0)} hopeless; {found.get('fitting', 0)} fit, and {found.get('new', 0)} are new",
            remedy="add prompts of medium difficulty, raise sampling.num_samples or temperature, or end the run; "
            "until then the few that fit are drawn again and again",
        )


def poison_ticket(view: View) -> Iterator[Cause]:
    times = view.train.oldest_times
    # In an outage, the oldest ticket is handed back repeatedly.
    if times is not None and times >= _TIMES_POISON and not any(reward_outage(view)):
        yield attention(
            title="a ticket goes from worker to worker",
            evidence=f"the oldest one, issued {age(view.train.oldest_s)} ago, was leased {times} times and never "
            f"answered; {view.train.oldest_worker} holds it now",
            remedy="check whether it kills workers (their logs end with its prompt); if they are only slow, raise "
            "worker.lease_s",
        )


def failing_tickets(view: View) -> Iterator[Cause]:
    """Workers answer mostly with failures."""
    failed = sum(worker.failed_lately for worker in alive(view))
    delivered = sum(worker.ended_lately for worker in alive(view)) - failed
    if failed < _TIMES_POISON or failed < delivered:
        return
    errors = [letter["error"] for letter in view.dead.latest]
    yield Cause(
        level="attention" if delivered else "blocking",
        title="workers fail most tickets",
        evidence=f"{failed} of the last {failed + delivered} failed"
        + (f"; the last error: {errors[0]:.200}" if errors else ""),
        remedy="fix what the error names, often a reward source; a ticket becomes a dead letter after "
        "worker.max_attempts failures",
    )


def dead_letters(view: View) -> Iterator[Cause]:
    if view.dead.count:
        latest = f"; the last one: {view.dead.latest[0]['error']:.200}" if view.dead.latest else ""
        yield attention(
            title="some tickets failed for good",
            evidence=f"{plural(view.dead.count, 'dead letter')}{latest}",
            remedy="list them with `streamrl dead ls`, fix the cause, then run `streamrl dead retry --all`",
        )
