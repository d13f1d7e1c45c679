"""The gain of asynchrony with simulated latencies: samples per second by lag and number of GPUs, against two
synchronous schedules, and next to published figures.

    together   all GPUs generate, then all train, with a switch in between
    apart      some generate while the others wait, then the reverse: lag 0
    lag n      the same GPUs as `apart`, n batches ahead

The share of GPUs that generate is chosen for each schedule and number of GPUs by trying eighths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.async_sim import Load, Pace, apart, together
from bench.measure import Say
from bench.plot import draw_curves
from bench.report import Fact, Line

LAGS = (0, 1, 2, 4, 8)
_GPUS = (16, 64, 256)
_GROUPS_A_GPU = 8  # per step
_EIGHTHS = (3, 4, 5, 6, 7)
_PICTURE = Path("runs/bench/async.png")

# As published, each against a synchronous baseline of its authors' choice.
PUBLISHED: Mapping[str, float] = {
    "AReaL, 1.5B": 2.77,
    "verl fully async, 7B, 128 GPUs, least": 2.35,
    "verl fully async, 7B, 128 GPUs, most": 2.67,
    "PipelineRL, about": 2.0,
    "Laminar, up to": 5.5,
    "StreamRL, up to": 2.66,
    "ROLL Flash": 2.24,
    "NeMo-RL one step off, DeepSeek-V3, 512 H100": 1.77,
    "NeMo-RL one step off, Qwen3-30B, 16 GB200": 0.74,
}


def bench(*, quick: bool, say: Say) -> list[Line]:
    num_steps = 8 if quick else 40
    lines: list[Line] = list(_assumed(Load(groups_per_step=_GROUPS_A_GPU)))
    curves: dict[str, list[tuple[float, float]]] = {}
    for gpus in _GPUS:
        say(f"{gpus} GPUs")
        load = Load(groups_per_step=_GROUPS_A_GPU * gpus)
        in_turns = together(load, gpus=gpus, num_steps=num_steps)
        paces = {lag: _best(load, gpus=gpus, lag=lag, num_steps=num_steps) for lag in LAGS}
        lines += _of_cluster(gpus, in_turns, paces)
        curves[f"{gpus} GPUs"] = [(lag, pace.samples_per_s / in_turns.samples_per_s) for lag, pace in paces.items()]
    lines += [Fact(name=f"published: {name}", value=value, unit="x") for name, value in PUBLISHED.items()]
    say(draw_curves(_PICTURE, curves, x="lag setting, steps", y="samples/s over all GPUs in turns"))
    return lines


def _best(load: Load, *, gpus: int, lag: int, num_steps: int) -> Pace:
    paces = [
        apart(load, generating=gpus * n // 8, training=gpus - gpus * n // 8, lag=lag, num_steps=num_steps)
        for n in _EIGHTHS
    ]
    return max(paces, key=lambda pace: pace.samples_per_s)


def _of_cluster(gpus: int, in_turns: Pace, paces: Mapping[int, Pace]) -> Iterator[Line]:
    yield Fact(name=f"{gpus} GPUs, together", value=in_turns.samples_per_s, unit="samples/s")
    for lag, pace in paces.items():
        name = f"{gpus} GPUs, lag {lag}"
        yield Fact(name=f"{name}: / together", value=pace.samples_per_s / in_turns.samples_per_s, unit="x")
        yield Fact(name=f"{name}: / apart", value=pace.samples_per_s / paces[0].samples_per_s, unit="x")
        yield Fact(name=f"{name}: slots at work", value=100 * pace.generating, unit="%")
        yield Fact(name=f"{name}: learner at work", value=100 * pace.training, unit="%")
        yield Fact(name=f"{name}: lag found, mean", value=pace.lag_mean, unit="steps")
        yield Fact(name=f"{name}: lag found, most", value=pace.lag_max, unit="steps")


def _assumed(load: Load) -> Iterator[Line]:
    yield Fact(name="assumed: samples of a step for each GPU", value=load.groups_per_step * load.num_samples, unit="")
    yield Fact(name="assumed: response, median", value=load.median_tokens, unit="tokens")
    yield Fact(name="assumed: response, spread of its logarithm", value=load.spread, unit="")
    yield Fact(name="assumed: response, longest", value=load.longest_tokens, unit="tokens")
    yield Fact(name="assumed: a response grows by", value=load.tokens_per_s, unit="tokens/s")
    yield Fact(name="assumed: responses at a time on a GPU", value=load.slots_a_gpu, unit="")
    yield Fact(name="assumed: reward, median", value=load.reward_median_s, unit="s")
    yield Fact(name="assumed: trained on a GPU", value=load.trained_per_s, unit="tokens/s")
    yield Fact(name="assumed: publishing", value=load.publish_s, unit="s")
    yield Fact(name="assumed: switch of a GPU's work", value=load.switch_s, unit="s")
