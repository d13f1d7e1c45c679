"""Causes in the flow of tickets, groups and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from streamrl.ops.monitor.evidence import alive, is_running, lead, lead_waiting, reported, waiting_for
from streamrl.ops.monitor.lately import STEPS
from streamrl.ops.monitor.view import Cause, View, Worker, attention, blocking, info
from streamrl.telemetry.progress import Wait
from streamrl.terminal import age, plural, size

_SLOW_S = 60.0  # a wait of the learner for groups that counts as long
_SLOW_STEPS = 5.0  # so many times the last step's time, without a step
_TIMES_POISON = 3  # workers that lost the same ticket
_HIGH_SHARE = 0.9
# |log mu - log pi|, the mean over a step's fresh tokens, beyond what rounding explains. Measured with vLLM on CPUs:
#   float32   the quickstart's 0.7M parameters: 2e-7 to 7e-7 in 82 steps; a model of 135M: no token was off by 1e-3
#   bfloat16  SmolLM2-135M: 0.03 to 0.04 in 6 steps, the learner in float32 or bfloat16; no token off by 0.4
# Samples of weights one step older, as after a skipped load, are off by 1e-2 in the median of 189 steps of the
# quickstart (lr 2e-4), by 1.5e-3 or more in 95 % of them; SmolLM2's (lr 1e-5) by 0.05 to 0.12 in one run, no more than
# fresh ones in another. So a median beyond the bound was never noise here. A missing step shows in float32 at such a
# learning rate, not at 1e-6, and not in bfloat16, where only gross faults do (rows in another order: 1.9). None of it
# was measured on a GPU.
_FRESH_MISMATCH: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.15}
_TIMES_ROUNDING = 3.0  # or so many times the rounding that a worker has measured
_ENOUGH_FRESH = 3  # steps
_ENOUGH_GROUPS = 64  # for a share to be meaningful
_OF_ENVIRONMENT = "rewards/environment/"
_ENOUGH_FAILED, _MANY_FAILED = 8, 0.2  # rollouts, and their share: a few are any environment's
_MANY_WAIT, _SLOW_EPISODE_S = 0.5, 5.0  # of the rollouts under way; the oldest, for how long
_REMEDIES: Mapping[str, str] = {  # by why groups are dropped
    "zero_variance": "all samples of a group get the same reward: set data.curriculum=true, choose prompts that are "
    "neither too easy nor too hard, raise sampling.num_samples or temperature, or set "
    "algorithm.drop_zero_variance=false",
    "stale": "groups are too old when they arrive: raise lag.max_steps or hard_limit_steps, add workers, "
    "or lower sampling.max_tokens",
    "wrong_model": "a worker serves another model or tokenizer: compare its --model with the run's",
    "non_finite": "losses are not finite: lower optimizer.lr, and check the rewards",
}


def reward_outage(view: View) -> Iterator[Cause]:
    """A reward source is out, or workers wait for rewards."""
    workers = alive(view)
    waiting = waiting_for(view, Wait.REWARDS)
    broken = [source for source in view.rewards if source.state not in (None, "well")]
    if waiting or broken:
        evidence = [f"{s.name}: {s.state}, {plural(s.errors, 'error')}" for s in broken]
        if waiting:
            longest = max(worker.part.doing_s for worker in waiting)
            evidence.append(f"{len(waiting)} of {len(workers)} workers wait for rewards, for up to {age(longest)}")
        yield Cause(
            level="blocking" if waiting and len(waiting) == len(workers) else "attention",
            title="a reward source does not answer",
            evidence="; ".join(evidence),
            remedy="start or fix the service named above (ask a reward server with GET /health; for a judge check "
            "key, model and token_budget); workers then continue by themselves",
        )


def environment_fails(view: View) -> Iterator[Cause]:
    """The environment raises errors, its processes die, or its answers are late."""
    stats = _environment_stats(view)
    played, failed = (sum(round(numbers.get(name, 0.0)) for _, numbers in stats) for name in ("scored", "failed"))
    if failed < _ENOUGH_FAILED or failed < _MANY_FAILED * (played + failed):
        return
    errors = [str(worker.detail.get(f"{_OF_ENVIRONMENT}error", "")) for worker, _ in stats]
    last = next((f"; the last one: {error}" for error in errors if error), "")
    yield Cause(
        level="attention" if played else "blocking",
        title="the environment fails rollouts",
        evidence=f"{failed} of {played + failed}{last}",
        remedy="fix that error; `streamrl doctor CONFIG` plays the environment on your rows. A call that hangs is "
        "given up after environment.timeout_s; a process that dies takes its rollouts with it",
    )


def environment_is_slow(view: View) -> Iterator[Cause]:
    """The learner waits for groups, and most rollouts wait for their environment."""
    part = lead_waiting(view, Wait.GROUPS)
    active = [(worker, numbers) for worker, numbers in _environment_stats(view) if numbers.get("under_way")]
    if part is None or not active:
        return
    under_way = round(sum(numbers["under_way"] for _, numbers in active))
    in_model = min(under_way, sum(worker.in_flight or 0 for worker, _ in active))
    environment_s, model_s = (
        median(numbers.get(name, 0.0) for _, numbers in active) for name in ("latency_s", "model_s")
    )
    oldest = max(numbers.get("oldest_s", 0.0) for _, numbers in active)
    if under_way - in_model < _MANY_WAIT * under_way or oldest < _SLOW_EPISODE_S:
        return
    slow = part.doing_s > max(_SLOW_S, 10 * view.learner.metrics.get("timers/step", 0.0))
    yield Cause(
        level="attention" if slow else "info",
        title="rollouts wait for their environment",
        evidence=f"{under_way - in_model} of {plural(under_way, 'rollout')} in flight, the oldest for {age(oldest)}; "
        f"a finished one spent {environment_s:.1f} s in the environment and {model_s:.1f} s in the model",
        remedy="raise worker.max_groups_in_flight, so that other rollouts keep the engine busy; raise "
        "environment.processes if the environment computes, or add replicas if it is a service; "
        "environment.timeout_s limits calls that hang",
    )


def _environment_stats(view: View) -> list[tuple[Worker, dict[str, float]]]:
    """Return the environment's statistics by worker, as numbers."""
    stats = []
    for worker in alive(view):
        numbers = {
            name.removeprefix(_OF_ENVIRONMENT): float(value)
            for name, value in worker.detail.items()
            if name.startswith(_OF_ENVIRONMENT) and not isinstance(value, str)
        }
        stats += [(worker, numbers)] if numbers else []
    return stats


def byte_budget_reached(view: View) -> Iterator[Cause]:
    budget, train = view.limits.max_backlog_bytes, view.train
    if not budget or not train.groups or train.tickets:
        return
    # Redis uses about a quarter more memory than the groups' bytes, which the setting counts.
    used = max(reported(view, "stream/backlog_bytes"), train.group_bytes / 1.25)
    if used + used / train.groups >= budget and lead_waiting(view, Wait.GROUPS):
        yield blocking(
            title="the stream's byte budget is used up",
            evidence=f"{plural(train.groups, 'group')} take {size(used)} of redis.max_backlog_bytes = {size(budget)}: "
            "no more tickets are issued",
            remedy="raise redis.max_backlog_bytes (and maxmemory with it), or checkpoint more often: each checkpoint "
            "frees the groups that were trained",
        )


def draws_refused(view: View) -> Iterator[Cause]:
    """The curriculum's draws do not fit on the disk of the run's folder, and no ticket is issued until they do."""
    if times := reported(view, "curriculum/refused"):
        yield Cause(
            level="blocking" if lead_waiting(view, Wait.GROUPS) and not view.train.tickets else "attention",
            title="the curriculum's log cannot be written, so no more tickets are issued",
            evidence=f"it failed {times:.0f} times in a row; {plural(view.train.tickets, 'ticket')} are still open",
            remedy="free space on the disk of the run's folder, or fix its permissions (the learner's log has the "
            "error); the run then continues by itself",
        )


def all_groups_dropped(view: View) -> Iterator[Cause]:
    """All groups since the last step, long ago, were dropped. Many drops between steps are normal for a good model."""
    live, at_last_step = view.learner.live, view.learner.metrics
    batch, part = view.limits.groups_per_step, lead_waiting(view, Wait.GROUPS)
    if not live or not batch or part is None:
        return
    if part.progress_s < max(_SLOW_S, _SLOW_STEPS * at_last_step.get("timers/step", 0.0)):
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
    workers = [worker for worker in alive(view) if worker.failed]
    delivered = sum(worker.delivered for worker in alive(view))
    failed = sum(worker.failed for worker in workers)
    if failed < _TIMES_POISON or failed < delivered:
        return
    errors = [letter["error"] for letter in view.dead.latest]
    yield Cause(
        level="attention" if delivered else "blocking",
        title="workers fail most tickets",
        evidence=f"{failed} failed, {delivered} delivered" + (f"; the last error: {errors[0]:.200}" if errors else ""),
        remedy="fix what the error names, often a reward source; a ticket becomes a dead letter after "
        "worker.max_attempts failures",
    )


def stragglers(view: View) -> Iterator[Cause]:
    if part := lead_waiting(view, Wait.STRAGGLERS):
        yield Cause(
            level="blocking" if part.doing_s > _SLOW_S else "info",
            title="a full batch waits for old tickets",
            evidence=f"for {age(part.doing_s)}; the oldest ticket, leased by {view.train.oldest_worker or 'nobody'}, "
            f"was issued {age(view.train.oldest_s)} ago (lag.stale = wait)",
            remedy="raise lag.max_steps, lower sampling.max_tokens or lag.wait_s, or set lag.stale = mask; otherwise "
            "the longest answers set the pace",
        )


def lag_bound_reached(view: View) -> Iterator[Cause]:
    """Workers have no tickets because the learner has requested as many groups as the lag bound allows."""
    lag, batch, train = view.limits.max_lag_steps, view.limits.groups_per_step, view.train
    idle = waiting_for(view, Wait.TICKETS)
    if lag is None or batch is None or not is_running(view) or not idle or len(idle) < len(alive(view)):
        return
    ready = min(train.groups, (lag + 1) * batch)
    if train.tickets or train.groups < batch or lead_waiting(view, Wait.GROUPS, Wait.RESUME):
        return
    part = lead(view)
    activity = f"{part.doing}, for {age(part.doing_s)}" if part else "does not report"
    yield info(
        title="workers wait for the learner: the lag bound is reached",
        evidence=f"no ticket is left to lease, {ready} groups wait to be trained, and at most (lag.max_steps + 1) x "
        f"groups_per_step = {(lag + 1) * batch} may be open; the learner: {activity}",
        remedy="the learner is the bottleneck: give it more ranks or fewer tokens per step, or use fewer workers; "
        "a larger lag.max_steps only helps against bursts",
    )


def generation_is_slow(view: View) -> Iterator[Cause]:
    part = lead_waiting(view, Wait.GROUPS)
    if part is None or not view.train.tickets:
        return
    workers = [worker for worker in alive(view) if not worker.rejected]  # these are a cause of their own
    if not workers:
        return
    slow = part.doing_s > max(_SLOW_S, 10 * view.learner.metrics.get("timers/step", 0.0))
    speed = sum(worker.tokens_per_s or 0.0 for worker in workers)
    yield Cause(
        level="attention" if slow else "info",
        title="the learner waits for groups",
        evidence=f"for {age(part.doing_s)}; {plural(len(workers), 'worker')} generate {speed:.0f} tokens/s, "
        f"{view.train.leased} of {plural(view.train.tickets, 'ticket')} are leased",
        remedy="generation is the bottleneck: add workers, or raise worker.max_groups_in_flight",
    )


def evaluating(view: View) -> Iterator[Cause]:
    if part := lead_waiting(view, Wait.EVALUATION):
        yield info(
            title="validation is running",
            evidence=f"for {age(part.doing_s)}; {plural(view.streams[1].tickets, 'ticket')} not answered yet",
            remedy="wait for it, or shorten it with validation.max_prompts and validation.timeout_s",
        )


def validation_ranks_nothing(view: View) -> Iterator[Cause]:
    """The last validation lacks so many answers that it takes no part in choosing the best checkpoint."""
    found = view.learner.validation
    if found.get("val_rollouts/ranks", 1.0):
        return
    unanswered, incomplete = (int(found.get(f"val_rollouts/num_{name}", 0.0)) for name in ("unanswered", "incomplete"))
    samples = f", and {incomplete} lack samples" if incomplete else ""
    yield attention(
        title="the last validation has too few answers to rank its checkpoint",
        evidence=f"{unanswered} of {unanswered + int(found.get('val_rollouts/num_prompts', 0.0))} prompts are "
        f"unanswered{samples}: checkpoint.keep_best and RUN@best go by other validations",
        remedy="look in the learner's log for 'validation prompt given up', with the line and its error, and fix that; "
        "for 'validation timed out', and raise validation.timeout_s or lower validation.max_prompts; or for "
        "'validation has no checkpoint.best_by', and fix why samples fail (sample_failed in the workers' logs)",
    )


def engine_disagrees(view: View) -> Iterator[Cause]:
    """Engine and learner disagree on samples of exactly the weights that were trained next. The median over steps,
    since a single odd batch is no fault."""
    found, arithmetic = view.learner.fresh_mismatch, view.limits.arithmetic
    if len(found) < _ENOUGH_FRESH or arithmetic is None or not is_running(view):
        return
    roundings = [value for w in alive(view) if isinstance(value := w.detail.get("rounding"), int | float)]
    tolerance = max(_FRESH_MISMATCH[arithmetic], _TIMES_ROUNDING * max(roundings, default=0.0))
    if (mismatch := median(found)) > tolerance:
        yield attention(
            title="engine and learner disagree on fresh samples",
            evidence=f"for tokens sampled by the newest weights their log-probs are {mismatch:.2g} apart (median of "
            f"the last {len(found)} steps with such tokens); in {arithmetic} up to {tolerance:.2g} is usual",
            remedy="the engine computes something else, although its weights were verified: check when "
            "policy/fresh_mismatch rose, what was upgraded then, and worker.engine_args (quantization, "
            "kv_cache_dtype); worker.engine=transformers computes as the learner does",
        )


def dead_letters(view: View) -> Iterator[Cause]:
    if view.dead.count:
        latest = f"; the last one: {view.dead.latest[0]['error']:.200}" if view.dead.latest else ""
        yield attention(
            title="some tickets failed for good",
            evidence=f"{plural(view.dead.count, 'dead letter')}{latest}",
            remedy="list them with `streamrl dead ls`, fix the cause, then run `streamrl dead retry --all`",
        )


def steps_skipped(view: View) -> Iterator[Cause]:
    if skipped := view.learner.skipped_lately:
        yield attention(
            title="optimizer steps were skipped",
            evidence=f"{skipped} of the last {min(STEPS, view.run.step)} had a loss or gradient that is not finite",
            remedy="lower optimizer.lr or algorithm.loss_args.clamp, and check the rewards",
        )
