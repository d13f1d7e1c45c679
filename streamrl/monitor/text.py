"""A `View` as plain text: one screen, at most 100 columns, for `streamrl status` and `streamrl why`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import wrap

from streamrl.monitor.units import age, number, plural, size
from streamrl.monitor.view import Cause, Part, View, Worker
from streamrl.telemetry.metrics import OF_LOSS
from streamrl.terminal import printable, sparkline

WIDTH = 100
_LABEL = 9
_MAX_SHOWN = 3  # reward sources, silent workers
_CURVE = 24  # columns
_MARKS = {"blocking": "!!", "attention": "! ", "info": "  "}


def status_lines(view: View, *, width: int = WIDTH) -> list[str]:
    rows = [
        ("run", run_line(view)),
        ("health", health_line(view)),
        ("learner", learner_line(view)),
        ("", metrics_line(view)),
        ("workers", workers_line(view)),
        *reward_rows(view),
        *(("streams" if not place else "", line) for place, line in enumerate(stream_lines(view))),
        ("weights", weights_line(view)),
        ("drops", drops_line(view)),
        ("dead", dead_line(view)),
        ("redis", redis_line(view)),
    ]
    return [f"{name:<{_LABEL}}{printable(text)}"[:width].rstrip() for name, text in rows if text]


def why_lines(view: View, *, width: int = WIDTH) -> list[str]:
    """Every cause with its evidence and remedy, the one to look at first."""
    lines = [f"{view.run.name}: {view.verdict}"]
    if not view.causes:
        return [*lines, f"   nothing holds it back: {learner_line(view)}"]
    for cause in view.causes:
        lines += ["", *cause_lines(cause, width=width)]
    return lines


def cause_lines(cause: Cause, *, width: int = WIDTH) -> Iterator[str]:
    yield f"{_MARKS[cause.level]} {printable(cause.title)}"
    yield from _paragraph("seen", cause.evidence, width=width)
    yield from _paragraph("do", cause.remedy, width=width)


def _paragraph(label: str, text: str, *, width: int) -> Iterator[str]:
    first, rest = f"   {label:<6}", " " * 9
    yield from wrap(printable(text), width=width, initial_indent=first, subsequent_indent=rest)


def run_line(view: View) -> str:
    run = view.run
    words = [run.name, run.state if run.control == "run" else f"{run.state}, told to {run.control}"]
    words.append(f"step {run.step}" + (f"/{run.max_steps}" if run.max_steps else ""))
    if run.share_done is not None:
        words.append(f"{run.share_done:.0%}")
    if run.eta_s is not None:
        words.append(f"{age(run.eta_s)} left")
    words.append(f"epoch {run.epoch}")
    if run.created_at:
        words.append(f"began {age(view.at - run.created_at)} ago")
    return "  ".join(words)


def health_line(view: View) -> str:
    if not view.causes:
        return view.verdict
    first: Cause = view.causes[0]
    more = f" (and {len(view.causes) - 1} more: `streamrl why`)" if len(view.causes) > 1 else ""
    return f"{view.verdict}: {first.title}{more}"


def activity(part: Part) -> str:
    """What it does, for how long; plainly when it is gone."""
    if part.state == "silent":
        return f"silent for {age(part.report_s)}"
    if part.state == "waiting":
        return f"waits for {part.doing} {age(part.doing_s)}"
    return f"{part.doing} {age(part.doing_s)}"


def learner_line(view: View) -> str:
    lead = view.learner.lead
    if lead is None:
        return f"not there; {view.learner.holder} holds the lease" if view.learner.holder else "not there"
    ranks = f", {view.learner.ranks} ranks" if view.learner.ranks > 1 else ""
    return f"{activity(lead)}, progress {age(lead.progress_s)} ago{ranks}"


METRICS = (
    ("reward", "train_rollouts/rewards"),
    ("KL", "train_rollouts/init_policy_kl"),
    ("loss", "train_optim/loss"),
    ("ratio", "policy/ratio_mean"),
    ("ESS", "policy/ess"),
    ("lag", "lag/mean"),
    ("tok/s", "throughput/tokens_per_s"),
)


def metric_words(view: View) -> list[str]:
    found = view.learner.metrics
    of_loss = [(printable(metric.removeprefix(OF_LOSS)), metric) for metric in found if metric.startswith(OF_LOSS)]
    return [f"{name} {number(found[metric])}" for name, metric in (*METRICS, *of_loss) if metric in found]


def metrics_line(view: View) -> str:
    words = metric_words(view)
    curve = sparkline(view.learner.rewards, _CURVE)
    return "  ".join([words[0], curve, *words[1:]]) if words else ""


def workers_line(view: View) -> str:
    alive = [worker for worker in view.workers if worker.part.alive]
    if not view.workers:
        return "none"
    doing = Counter(_kind(worker) for worker in alive)
    words = [", ".join(f"{count} {what}" for what, count in doing.most_common()) or "none report"]
    words.append(f"{number(sum(w.tokens_per_s or 0 for w in alive))} tokens/s")
    words.append(f"{sum(w.in_flight or 0 for w in alive)} in flight")
    silent = [worker.part for worker in view.workers if not worker.part.alive]
    if silent:
        words.append(f"{len(silent)} silent ({_names(silent)})")
    return "; ".join(words)


def _kind(worker: Worker) -> str:
    if worker.rejected:
        return f"reject {worker.rejected_version or 'the weights'}"
    return f"wait for {worker.part.doing}" if worker.part.state == "waiting" else worker.part.doing


def _names(parts: Sequence[Part]) -> str:
    more = ", ..." if len(parts) > _MAX_SHOWN else ""
    return ", ".join(part.name.partition("/")[2] or part.name for part in parts[:_MAX_SHOWN]) + more


def reward_rows(view: View) -> Iterator[tuple[str, str]]:
    for place, source in enumerate(view.rewards[:_MAX_SHOWN]):
        words = [source.name, f"mean {number(source.mean)}"]
        if source.latency_s is not None:
            words.append(f"{1000 * source.latency_s:.0f} ms")
        words.append(plural(source.errors, "error"))
        if source.state is not None:
            words.append(source.state)
        yield "rewards" if not place else "", "  ".join(words)


def stream_lines(view: View) -> Iterator[str]:
    for stream in view.streams:
        if stream.purpose != "train" and not stream.tickets and not stream.groups:
            continue
        words = [f"{stream.purpose}: {plural(stream.tickets, 'ticket')} ({stream.leased} leased)"]
        words.append(f"{plural(stream.groups, 'group')} ({size(stream.group_bytes)})")
        if stream.oldest_s is not None:
            words.append(f"oldest lease {age(stream.oldest_s)}, of {stream.oldest_worker}")
        yield "; ".join(words)


def weights_line(view: View) -> str:
    weights = view.weights
    if weights.latest is None:
        return "none published"
    words = [f"{weights.latest} (step {weights.step}, {age(weights.age_s)} ago)", f"{weights.kept} kept"]
    if weights.num_bytes is not None and weights.largest_bytes:
        words.append(f"{size(weights.num_bytes)}, {weights.num_bytes / weights.largest_bytes:.1%} of the largest")
    words.append(f"{plural(weights.behind, 'worker')} behind, by {weights.worst_lag} steps at most")
    return "; ".join(words)


def drops_line(view: View) -> str:
    drops = view.drops
    if not drops.trained and not drops.dropped:
        return ""
    reasons = ", ".join(f"{why} {count}" for why, count in sorted(drops.by_reason.items(), key=lambda kv: -kv[1]))
    line = f"{drops.dropped} dropped, {drops.trained} trained" + (f": {reasons}" if reasons else "")
    lengths = sorted((int(length), rate) for length, rate in drops.rate_by_length.items() if length.isdigit() and rate)
    if lengths:
        line += "; by length " + " ".join(f"<={length} {rate:.0%}" for length, rate in lengths)
    return line


def dead_line(view: View) -> str:
    if not view.dead.count:
        return "none"
    latest = f": {view.dead.latest[0]['error']}" if view.dead.latest else ""
    return f"{plural(view.dead.count, 'letter')}{latest}"


def redis_line(view: View) -> str:
    redis = view.redis
    limit = f" of {size(redis.max_bytes)}" if redis.max_bytes else ""
    return f"{redis.version} at {redis.server}, {size(redis.used_bytes)}{limit}"
