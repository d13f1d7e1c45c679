"""Causes in the flow of tickets and groups, and in the steps and validations that they lead to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from streamrl.ops.monitor.evidence import (
    SLOW_S,
    alive,
    is_running,
    lead,
    lead_publishing,
    lead_waiting,
    reported,
    room_for_more,
    waiting_for,
    waits_long,
)
from streamrl.ops.monitor.lately import STEPS
from streamrl.ops.monitor.reward_causes import environment_is_slow, rewards_are_slow
from streamrl.ops.monitor.view import Cause, View, attention, blocking, info
from streamrl.telemetry.progress import Wait
from streamrl.terminal import age, plural, size

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


def stragglers(view: View) -> Iterator[Cause]:
    if part := lead_waiting(view, Wait.STRAGGLERS):
        yield Cause(
            level="blocking" if part.doing_s > SLOW_S else "info",
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
    if train.tickets or train.groups < batch or lead_waiting(view, Wait.GROUPS, Wait.RESUME) or lead_publishing(view):
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
    if part is None or not view.train.tickets or any(environment_is_slow(view)) or any(rewards_are_slow(view)):
        return
    workers = [worker for worker in alive(view) if not worker.rejected]  # these are a cause of their own
    if not workers:
        return
    speed = sum(worker.tokens_per_s or 0.0 for worker in workers)
    yield Cause(
        level="attention" if waits_long(view, part) else "info",
        title="the learner waits for groups",
        evidence=f"for {age(part.doing_s)}; {plural(len(workers), 'worker')} generate {speed:.0f} tokens/s, "
        f"{view.train.leased} of {plural(view.train.tickets, 'ticket')} are leased",
        remedy=f"generation is the bottleneck: add workers, or {room_for_more(view)}",
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


def steps_skipped(view: View) -> Iterator[Cause]:
    if skipped := view.learner.skipped_lately:
        yield attention(
            title="optimizer steps were skipped",
            evidence=f"{skipped} of the last {min(STEPS, view.run.step)} had a loss or gradient that is not finite",
            remedy="lower optimizer.lr or algorithm.loss_args.clamp, and check the rewards",
        )
