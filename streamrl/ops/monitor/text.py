"""A `View` as plain text, at most 100 columns wide, for `streamrl status`, `top`, the launcher and `streamrl why`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from textwrap import wrap
from typing import Any

from streamrl.ops.monitor.evidence import alive
from streamrl.ops.monitor.view import Cause, PartStatus, View, WorkerStatus
from streamrl.telemetry.metrics import OF_LOSS
from streamrl.terminal import age, number, plural, printable, size, sparkline

WIDTH = 100
LABEL = 9  # columns
_MAX_SHOWN = 3  # reward sources, silent workers
_SHORTEST_CURVE = 8  # columns
_SUMMARY_LABELS = {"issued": "tickets", "trained": "trained", "lost": "lost", "twice": "twice", "seconds": "s"}
_MARKS = {"blocking": "!!", "attention": "! ", "info": "  "}


def rows(view: View, *, width: int = WIDTH) -> Iterator[tuple[str, str]]:
    """Yield (label, line) for everything there is to show; a continuation line has no label."""
    found = _of_redis(view, width=width) if view.run.folder is None else _of_folder(view, width=width)
    yield from ((label, printable(line)) for label, line in found if line)


def _of_folder(view: View, *, width: int) -> list[tuple[str, str]]:
    """Without parts and streams, which no longer exist."""
    return [
        ("run", run_line(view)),
        ("health", health_line(view)),
        *_labelled("step", iter(metrics_lines(view, width=width))),
        ("held out", held_out_line(view)),
        ("dtype", dtype_words(view)),
        ("rewards", "  ".join(f"{s.name} mean {number(s.mean)}" for s in view.rewards if s.mean is not None)),
        ("drops", drops_line(view)),
        ("prompts", prompts_line(view)),
        ("dead", dead_line(view)),
        ("summary", summary_words(view.summary)),
        ("folder", f"{view.run.folder}, the source of all this: the run's Redis is gone"),
    ]


def _of_redis(view: View, *, width: int) -> list[tuple[str, str]]:
    return [
        ("run", run_line(view)),
        ("health", health_line(view)),
        ("learner", learner_words(view)),
        *(("", line) for line in metrics_lines(view, width=width)),
        ("held out", held_out_line(view)),
        *_labelled("rewards", reward_lines(view)),
        *_labelled("streams", stream_lines(view)),
        ("weights", weights_line(view)),
        ("drops", drops_line(view)),
        ("prompts", prompts_line(view)),
        ("dead", dead_line(view)),
        ("redis", redis_line(view)),
        ("others", others_line(view)),
        ("restarts", f"{view.restarts} of parts that died" if view.restarts else ""),
        ("workers", workers_line(view)),
    ]


def _labelled(label: str, lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    yield from (("" if place else label, line) for place, line in enumerate(lines))


def status_lines(view: View, *, width: int | None = WIDTH) -> list[str]:
    """Format the status; width None: untruncated lines, for output that is no terminal."""
    return [f"{label:<{LABEL}}{line}"[:width].rstrip() for label, line in rows(view, width=width or WIDTH)]


def why_lines(view: View, *, width: int = WIDTH) -> list[str]:
    """Format every cause with its evidence and remedy, the most important first."""
    lines = [f"{view.run.name}: {view.verdict}"]
    if not view.causes:
        return [*lines, f"   nothing holds it back: {learner_words(view)}"]
    for cause in view.causes:
        lines += ["", *cause_lines(cause, width=width)]
    return lines


def cause_lines(cause: Cause, *, width: int = WIDTH) -> Iterator[str]:
    yield f"{_MARKS[cause.level]} {printable(cause.title)}"
    for label, text in (("seen", cause.evidence), ("do", cause.remedy)):
        yield from wrap(
            printable(text),
            width,
            initial_indent=f"   {label:<6}",
            subsequent_indent=" " * 9,
            # Commands and paths are copied from here, so they must not be broken.
            break_long_words=False,
            break_on_hyphens=False,
        )


def steps(view: View) -> str:
    return f"step {view.run.step}" + (f"/{view.run.max_steps}" if view.run.max_steps else "")


def run_line(view: View) -> str:
    run = view.run
    state = run.state if run.control == "run" else f"{run.state}, operator command: {run.control}"
    words = [run.name, state, steps(view)]
    if run.share_done is not None:
        words.append(f"{run.share_done:.0%}")
    if run.eta_s is not None:
        words.append(f"{age(run.eta_s)} left")
    words.append(f"term {run.term}")
    if run.created_at:
        words.append(f"began {age(view.at - run.created_at)} ago")
    if run.ended_at:
        words.append(f"ended {age(view.at - run.ended_at)} ago")
    return "  ".join(words)


def health_line(view: View) -> str:
    if not view.causes:
        return view.verdict
    more = f" (and {len(view.causes) - 1} more: `streamrl why`)" if len(view.causes) > 1 else ""
    return f"{view.verdict}: {view.causes[0].title}{more}"


def activity(part: PartStatus) -> str:
    """What a part does and for how long; clearly marked when it is gone."""
    if part.state == "silent":
        return f"silent for {age(part.report_s)}"
    if part.state == "waiting":
        return f"waits for {part.doing} {age(part.doing_s)}"
    return f"{part.doing} {age(part.doing_s)}"


def learner_line(view: View) -> str:
    lead, holder = view.learner.lead, view.learner.holder
    is_gone = lead is None or not lead.alive or (lead.state == "silent" and not holder)
    gone = "GONE: " if is_gone and view.run.state == "running" else ""
    if lead is None:
        return f"{gone}no rank reports; {holder} holds the lease" if holder else f"{gone}no rank reports"
    ranks = f", {view.learner.ranks} ranks" if view.learner.ranks > 1 else ""
    return f"{gone}{activity(lead)}, progress {age(lead.progress_s)} ago{ranks}"


def learner_words(view: View) -> str:
    """The learner's line with its dtype, which `dtype: auto` decides by machine."""
    dtype = dtype_words(view)
    return learner_line(view) + (f"; in {dtype}" if dtype else "")


def dtype_words(view: View) -> str:
    """Usually one dtype; empty if unknown."""
    learner, workers = view.limits.model_dtype, view.limits.weights_dtype
    return (learner or "") if learner == workers else f"{learner}, weights {workers}"


_METRICS = (  # in order of importance
    ("reward", "train_rollouts/rewards"),
    ("of all groups", "all_rollouts/rewards"),
    ("lag", "lag/mean"),
    ("max lag", "lag/max"),
    ("tok/s", "throughput/tokens_per_s"),
    ("KL", "train_rollouts/init_policy_kl"),
    ("ESS", "policy/ess"),
    ("entropy", "policy/entropy"),
    ("loss", "train_optim/loss"),
    ("ratio", "policy/ratio_mean"),
)


def metrics_lines(view: View, *, width: int = WIDTH) -> list[str]:
    """Format the last step's metrics in at most two lines, with a reward curve as long as there is room for."""
    found = view.learner.metrics
    of_loss = [(printable(metric.removeprefix(OF_LOSS)), metric) for metric in found if metric.startswith(OF_LOSS)]
    words = [f"{name} {number(found[metric])}" for name, metric in (*_METRICS, *of_loss) if metric in found]
    if not words:
        return ["no step has been made yet"]
    room = width - LABEL
    first = _fitting(words, room - 2 - _SHORTEST_CURVE)
    second = _fitting(words[len(first) :], room)
    curve = sparkline(view.learner.rewards, max(_SHORTEST_CURVE, room - 2 - len("  ".join(first))))
    return ["  ".join([first[0], curve, *first[1:]]), *(["  ".join(second)] if second else [])]


def _fitting(words: Sequence[str], room: int) -> Sequence[str]:
    """Return the leading words that fit on a line, at least one."""
    lengths = accumulate(len(word) + 2 for word in words)
    return words[: max(1, sum(length - 2 <= room for length in lengths))]


def held_out_line(view: View) -> str:
    curves = [(name, values) for name, values in view.learner.held_out.items() if values][:_MAX_SHOWN]
    return "  ".join(f"{name} {number(values[0])} → {number(values[-1])}" for name, values in curves)


def workers_line(view: View) -> str:
    if not view.workers:
        return "none"
    doing = Counter(_kind(worker) for worker in alive(view))
    words = [", ".join(f"{count} {kind}" for kind, count in doing.most_common()) or "none report"]
    words.append(f"{number(sum(w.tokens_per_s or 0 for w in alive(view)))} tokens/s")
    words.append(f"{sum(w.in_flight or 0 for w in alive(view))} in flight")
    silent = [worker.part for worker in view.workers if not worker.part.alive]
    if silent:
        words.append(f"{len(silent)} silent ({_names(silent)})")
    return "; ".join(words)


def _kind(worker: WorkerStatus) -> str:
    if worker.rejected:
        return f"reject {worker.rejected_version or 'the weights'}"
    return f"wait for {worker.part.doing}" if worker.part.state == "waiting" else worker.part.doing


def _names(parts: Sequence[PartStatus]) -> str:
    more = ", ..." if len(parts) > _MAX_SHOWN else ""
    return ", ".join(part.name.partition("/")[2] or part.name for part in parts[:_MAX_SHOWN]) + more


def others_line(view: View) -> str:
    """Omit launchers and others that only observe the run."""
    return "; ".join(f"{part.name} {activity(part)}" for part in view.others if part.role != "launcher")


def reward_lines(view: View) -> Iterator[str]:
    for source in view.rewards[:_MAX_SHOWN]:
        words = [source.name, f"mean {number(source.mean)}"]
        if source.latency_s is not None:
            words.append(f"{1000 * source.latency_s:.0f} ms")
        words.append(plural(source.errors, "error"))
        if source.tokens is not None:
            words.append(plural(source.tokens, "token"))
        if source.state is not None:
            words.append(source.state)
        yield "  ".join(words)


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
    words = [f"{weights.latest} (step {weights.step}, {age(weights.age_s)} ago)"]
    in_flight = sum(worker.loads_in_flight for worker in view.workers)
    words.append(f"{plural(sum(worker.loads for worker in view.workers), 'load')}, {in_flight} with samples in flight")
    words.append(f"{plural(weights.behind, 'worker')} behind, by {weights.worst_lag} steps at most")
    if weights.num_bytes is not None and weights.largest_bytes:
        words.append(f"{size(weights.num_bytes)}, {weights.num_bytes / weights.largest_bytes:.1%} of the largest")
    return "; ".join([*words, f"{weights.kept} kept"])


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


def prompts_line(view: View) -> str:
    """For a run with a curriculum."""
    found = view.prompts
    return ", ".join(f"{found[kind]} {kind}" for kind in ("new", "fitting", "solved", "hopeless") if kind in found)


def summary_words(summary: Mapping[str, Any] | None) -> str:
    """The outcome of the last launch, as its launcher recorded it."""
    facts = summary or {}
    words = [f"{facts[name]} {label}" for name, label in _SUMMARY_LABELS.items() if name in facts]
    return ", ".join(words) + (f"; model in {facts['export']}" if facts.get("export") else "")


def dead_line(view: View) -> str:
    if not view.dead.count:
        return ""
    latest = f": {view.dead.latest[0]['error']}" if view.dead.latest else ""
    return f"{plural(view.dead.count, 'letter')}{latest}"


def redis_line(view: View) -> str:
    redis = view.redis
    limit = f" of {size(redis.max_bytes)}" if redis.max_bytes else ""
    return f"{redis.version} at {redis.server}, {size(redis.used_bytes)}{limit}"
