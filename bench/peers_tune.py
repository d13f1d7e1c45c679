"""The effect of TRL's settings on its speed on two cores, to justify `bench.peers_trl_side.BEST`.

One setting is changed at a time; a run is a few steps on the same prompts, the first of which are excluded. A setting
with which TRL fails is reported and left out of the table. An alternative faster than the chosen settings misses its
bar. Takes about four minutes; --quick tries one alternative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.measure import Say
from bench.peer_trl import environment
from bench.peers_model import make_model, write_prompts
from bench.peers_sides import Limits, on_two_cores, run, trl_side
from bench.peers_terms import NUM_CORES, Terms
from bench.peers_trl_side import BEST, Settings
from bench.report import Bar, Fact, Line
from streamrl.errors import ResourceError

_FOLDER = Path("runs/bench/peers")
_FILLING = 2  # steps excluded from rates
_BEST = "chosen: two processes, whole micro-batches, fp32"
_OTHERS: Mapping[str, Settings] = {
    "one process of two threads": replace(BEST, processes=1, threads=NUM_CORES),
    "one process of one thread": replace(BEST, processes=1),
    "micro-batches of 16": replace(BEST, micro_batches=4),
    "one process of two threads, micro-batches of 32": replace(BEST, processes=1, threads=NUM_CORES, micro_batches=4),
    "bf16": replace(BEST, bf16=True),
    "continuous batching": replace(BEST, continuous_batching=True),
}


def bench(*, quick: bool, say: Say) -> list[Line]:
    folder = _FOLDER.resolve()
    terms, python = Terms(model=make_model(folder, say)), environment(say)
    prompts = folder / "prompts-tune.jsonl"
    write_prompts(prompts, seed=0, num_prompts=terms.num_prompts)
    limits = Limits(target=None, num_steps=_FILLING + (2 if quick else 8), seconds=120.0)

    def samples_per_s(name: str, settings: Settings) -> float:
        side = trl_side(python, settings)
        watched = run(side, terms, prompts=prompts, folder=folder / "tune", seed=0, limits=limits, say=say)
        rate, _ = watched.curve.rates(after=_FILLING)
        say(f"{name}: {rate:.1f} samples/s")
        return rate

    lines: list[Line] = []
    with on_two_cores():
        best = samples_per_s(_BEST, BEST)
        for name, settings in islice(_OTHERS.items(), 1 if quick else None):
            try:
                rate = samples_per_s(name, settings)
            except ResourceError as error:
                say(f"{name}: {error}")
                continue
            lines.append(Bar(name=f"{name} / chosen", value=rate / best, unit="x", goal=1.05, better="lower"))
    return [*lines, Fact(name=_BEST, value=best, unit="samples/s")]
