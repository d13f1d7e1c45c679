"""streamrl against TRL's RLOO trainer: same model, prompts, reward, samples per step, learning rate, and two cores.

    model, warmed up once ─┬─► TRL: generate ─► reward ─► learn, sequentially ─┐
    prompts of the round  ─┴─► streamrl up: Redis, one vLLM worker, a learner ─┴─► in turns, until the reward is reached
                                                                                   ─► both graded alike

Answer lengths are long-tailed (bench.peers_task). Both start from the same folder, see the same prompts in the same
order, use the same reward function, sample at temperature 1 up to the same length, and optimise the same objective:
RLOO, logprobs summed over an answer, no KL, no scaling by the standard deviation, nothing masked, groups of equal
rewards kept, AdamW at a constant rate, no gradient clipping, fp32. A run ends when the mean reward of several steps'
samples, when they were generated, is high enough. Both save their weights every few steps; graded afterwards
(bench.peers_grades) on prompts held out, they give accuracies by time and by tokens, which the bars compare. A run that
never reaches the accuracy counts with its whole time and misses a bar of its own, since comparing times is meaningless
then.

TRL has its fastest settings for this machine (bench.peers_trl_side lists and explains them, `python -m bench peers-trl`
measures them), and saves nothing but these weights. streamrl: one worker and one learner with one thread each,
`lag.max_steps` 2, a whole checkpoint wherever TRL saves weights, no validation.

On both sides time counts from the moment the first sample can be requested; starting Python and loading are reported
separately. Rates leave the first steps out. Memory is the peak of a side's whole process tree, counting shared pages
once. The first run of each side is short and discarded. Finished runs are kept in runs/bench/peers, so that an
interrupted bench resumes; the logs of the last runs are there too. --quick compares the rates of a few steps, without a
target; its first run creates TRL's environment and the model, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from bench.measure import Say
from bench.peers_curve import Target
from bench.peers_grades import Grade, Grades, grade
from bench.peers_model import make_model, write_prompts
from bench.peers_sides import Limits, Side, Watched, on_two_cores, run, sides
from bench.peers_terms import Terms
from bench.peers_trl_side import BEST
from bench.plot import draw_curves
from bench.report import Bar, Fact, Line
from bench.resume import Done, commit_of

_FOLDER = Path("runs/bench/peers")
_FILLING = 2  # steps excluded from rates
_WINDOW = 20  # rewards are means over this many steps: a single step's varies by 0.13
_ACCURACY = 0.45  # of answers from numbers held out; the model that both begin with has 0.36
_WARM_UP = Limits(target=None, num_steps=2, seconds=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    limits: Limits
    num_rounds: int
    warm_up: bool  # each side's first run is discarded
    graded: bool


_FULL = Plan(
    limits=Limits(target=Target(reward=0.75, window=_WINDOW), num_steps=400, seconds=900.0),
    num_rounds=2,
    warm_up=True,
    graded=True,
)
_QUICK = Plan(
    limits=Limits(target=None, num_steps=_FILLING + 4, seconds=120.0), num_rounds=1, warm_up=False, graded=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run."""

    samples_per_s: float
    tokens_per_s: float
    target_s: float  # time to the target of rewards; the whole time, if it was not reached
    num_steps: int  # in that time
    ready_s: float
    peak_bytes: int
    points: Sequence[Sequence[float]]  # (seconds, reward) per step
    grades: Sequence[Mapping[str, float]]

    @staticmethod
    def of(watched: Watched, target: Target | None, grades: Grades) -> Outcome:
        counted = (target and watched.curve.until(target)) or watched.curve
        samples_per_s, tokens_per_s = counted.rates(after=_FILLING)
        return Outcome(
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            target_s=counted.seconds,
            num_steps=len(counted.steps),
            ready_s=watched.ready_s,
            peak_bytes=watched.peak_bytes,
            points=counted.points(),
            grades=[asdict(point) for point in grades.points],
        )

    @property
    def graded(self) -> Grades:
        return Grades(points=[Grade(**point) for point in self.grades])

    @property
    def reached(self) -> bool:
        return self.graded.seconds_until(_ACCURACY) is not None

    @property
    def accurate_s(self) -> float:
        """Return the seconds until the accuracy was reached; the whole time, if it was not."""
        seconds = self.graded.seconds_until(_ACCURACY)
        return self.target_s if seconds is None else seconds

    @property
    def with_start_s(self) -> float:
        return self.ready_s + self.accurate_s


def bench(*, quick: bool, say: Say) -> list[Line]:
    plan, folder = _QUICK if quick else _FULL, _FOLDER.resolve()
    terms = Terms(model=make_model(folder, say))
    trl, streamrl = sides(say)
    made_of = f"{commit_of(Path('.'))} {terms} {plan}"
    done = Done(folder / f"outcomes{'-quick' if quick else ''}.jsonl", of=made_of)
    with on_two_cores():
        measure(plan, terms, (trl, streamrl), folder=folder, done=done, say=say)
    done.complete()
    found = {side.name: [Outcome(**done[_name(side, n)]) for n in range(plan.num_rounds)] for side in (trl, streamrl)}
    with_target = plan.limits.target is not None
    if with_target:
        say(draw_curves(folder / "curves.png", _pictured(found), x="seconds", y=f"mean reward of {_WINDOW} steps"))
        say(draw_curves(folder / "accuracy.png", _pictured_grades(found), x="tokens", y="held-out accuracy"))
    figures = lines(found, ours=streamrl.name, theirs=trl.name, with_target=with_target)
    return [*figures, *BEST.facts(terms)]


def measure(plan: Plan, terms: Terms, peers: Sequence[Side], *, folder: Path, done: Done, say: Say) -> None:
    """Run what is not done yet."""

    def run_once(side: Side, number: int, limits: Limits) -> Watched:
        prompts = folder / f"prompts-{number}.jsonl"
        write_prompts(prompts, seed=number, num_prompts=terms.num_prompts)
        return run(side, terms, prompts=prompts, folder=folder / side.name, seed=number, limits=limits, say=say)

    missing = [(number, side) for number in range(plan.num_rounds) for side in peers if _name(side, number) not in done]
    if plan.warm_up and missing:
        for side in peers:
            say(f"{side.name}: a first run, discarded")
            run_once(side, 0, _WARM_UP)
    for number, side in missing:
        say(f"round {number + 1} of {plan.num_rounds}: {side.name}")
        watched, target = run_once(side, number, plan.limits), plan.limits.target
        snapshots = side.snapshots(folder / side.name)
        grades = grade(terms.model, watched.curve, snapshots) if plan.graded else Grades(points=())
        outcome = Outcome.of(watched, target, grades)
        done.add(_name(side, number), asdict(outcome))
        took = f"{outcome.num_steps} steps in {outcome.target_s:.0f} s"
        accuracies = [f"{point.accuracy:.2f}" for point in grades.points]
        say(f"{side.name}: {outcome.samples_per_s:.1f} samples/s; {took}; accuracy {' '.join(accuracies)}")


def _name(side: Side, number: int) -> str:
    return f"{side.name} {number}"


def lines(found: Mapping[str, Sequence[Outcome]], *, ours: str, theirs: str, with_target: bool) -> Iterator[Line]:
    def ratio(what: str) -> float:
        """Return the median of the ratios per round."""
        pairs = zip(found[ours], found[theirs], strict=True)
        return median(getattr(our, what) / getattr(their, what) for our, their in pairs)

    yield Bar(name="samples/s / TRL's", value=ratio("samples_per_s"), unit="x", goal=2.0, better="higher")
    if with_target:
        accurate = f"time to a held-out accuracy of {_ACCURACY:g}"
        yield Bar(name=f"{accurate} / TRL's", value=ratio("accurate_s"), unit="x", goal=0.2, better="lower")
        with_start = ratio("with_start_s")
        yield Bar(name=f"{accurate}, with starting / TRL's", value=with_start, unit="x", goal=0.25, better="lower")
        beyond = median(
            _beyond(our.graded, their.graded) for our, their in zip(found[ours], found[theirs], strict=True)
        )
        yield Bar(name="held-out accuracy by tokens, beyond TRL's", value=beyond, unit="", goal=0.0, better="higher")
        for name in (theirs, ours):  # if one does not learn, comparing times is meaningless
            reached, num_runs = sum(outcome.reached for outcome in found[name]), len(found[name])
            yield Bar(name=f"{name}: runs that learned it", value=reached, unit="", goal=num_runs, better="higher")
        yield Fact(name="time to the same reward / TRL's", value=ratio("target_s"), unit="x")
    yield Fact(name="useful tokens/s / TRL's", value=ratio("tokens_per_s"), unit="x")
    yield Fact(name="peak memory / TRL's", value=ratio("peak_bytes"), unit="x")
    for name in (ours, theirs):
        yield from _facts(name, found[name], with_target=with_target)


def _beyond(ours: Grades, theirs: Grades) -> float:
    """Return the mean difference in accuracy at ten equal numbers of tokens, up to where the shorter run ended."""
    end = min(grades.points[-1].tokens for grades in (ours, theirs))
    return mean(ours.after(end * part / 10) - theirs.after(end * part / 10) for part in range(1, 11))


def _facts(name: str, outcomes: Sequence[Outcome], *, with_target: bool) -> Iterator[Fact]:
    def median_of(field: str) -> float:
        return median(getattr(outcome, field) for outcome in outcomes)

    yield Fact(name=f"{name}: samples", value=median_of("samples_per_s"), unit="samples/s")
    yield Fact(name=f"{name}: useful tokens", value=median_of("tokens_per_s"), unit="tokens/s")
    if with_target:
        yield Fact(
            name=f"{name}: time to a held-out accuracy of {_ACCURACY:g}", value=median_of("accurate_s"), unit="s"
        )
        yield Fact(name=f"{name}: time to the reward", value=median_of("target_s"), unit="s")
        yield Fact(name=f"{name}: steps to the reward", value=median_of("num_steps"), unit="")
        for what, at in (("at first", 0), ("in the end", -1)):
            for numbers, field in (("held out", "accuracy"), ("trained", "trained")):
                value = median(getattr(outcome.graded.points[at], field) for outcome in outcomes)
                yield Fact(name=f"{name}: accuracy from numbers {numbers}, {what}", value=value, unit="")
        yield from _curve(name, [outcome.points for outcome in outcomes])
    yield Fact(name=f"{name}: from its start to the first sample", value=median_of("ready_s"), unit="s")
    yield Fact(name=f"{name}: peak memory", value=median_of("peak_bytes") / 2**20, unit="MiB")


def _curve(name: str, runs: Sequence[Sequence[Sequence[float]]]) -> Iterator[Fact]:
    """Yield the reward after 20, 40, 80, ... steps, averaged over the runs that got that far."""
    last = _WINDOW
    while any(len(points) >= last for points in runs):
        windows = [points[last - _WINDOW : last] for points in runs if len(points) >= last]
        reward = mean(reward for window in windows for _, reward in window)
        seconds = mean(window[-1][0] for window in windows)
        yield Fact(name=f"{name}: reward after {last} steps, {seconds:.0f} s", value=reward, unit="")
        last *= 2


def _pictured(found: Mapping[str, Sequence[Outcome]]) -> dict[str, list[tuple[float, float]]]:
    def smooth(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        ends = range(_WINDOW, len(points) + 1)
        return [(points[end - 1][0], mean(reward for _, reward in points[end - _WINDOW : end])) for end in ends]

    return {f"{name} {n + 1}": smooth(run.points) for name, runs in found.items() for n, run in enumerate(runs)}


def _pictured_grades(found: Mapping[str, Sequence[Outcome]]) -> dict[str, list[tuple[float, float]]]:
    return {
        f"{name} {n + 1}": [(point.tokens, point.accuracy) for point in run.graded.points]
        for name, runs in found.items()
        for n, run in enumerate(runs)
    }
