"""The reward server against direct calls of its model: how much of the hardware's speed reaches callers.

    texts ─► the workers' HTTP client ─► server, in its own process: tokenise, batch, forward ─► scores
    token ids, batched optimally ─► forward, in its own process                                 (the comparison)

Both use one thread for forward passes and prepare their process alike. The comparison is the best of several batch
sizes, with rows sorted by length, so that there is hardly any padding; tokenising and building tensors are excluded
from its time.

Speed differs between process starts, so both are restarted for every round, and figures are medians over the rounds.
They take turns being measured first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from bench.measure import Rounds, Say
from bench.report import Bar, Fact, Line
from bench.reward_sides import Bare, Server, running_bare, running_server
from streamrl.config import schema
from streamrl.held_folders import scratch_folder

_SHORTEST, _LONGEST = 16, 512  # characters, one token each
_SERVED_BATCH_TOKENS = 4096
_BARE_BATCH_TOKENS = (256, 512, 1024, 2048)
_NUM_WARMING = 16  # texts; one full batch of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One start of both."""

    server: float  # texts/s
    bare: float
    lone_ms: float  # p50
    bare_lone_ms: float

    @property
    def ratio(self) -> float:
        return self.server / self.bare

    def __str__(self) -> str:
        return f"bare {self.bare:.4g}, server {self.server:.4g} texts/s, {self.ratio:.3f} x"


def bench(*, quick: bool, say: Say) -> list[Line]:
    from bench.reward_model import ALPHABET, write_reward_model  # imports torch

    rng = random.Random(0)
    lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(48 if quick else 512)]
    texts = ["".join(rng.choices(ALPHABET, k=length)) for length in lengths]
    num_rounds, num_lone = (3, 10) if quick else (7, 40)
    with scratch_folder() as folder:
        write_reward_model(folder / "model")
        with running_bare(folder / "model") as bare:
            best = _best_size(bare, texts, say)
        rounds = []
        for number in range(1, num_rounds + 1):
            with running_bare(folder / "model") as bare, _running_server(folder) as server:
                one = _measure(server, bare, texts, batch_tokens=best, num_lone=num_lone, server_first=number % 2 == 0)
            rounds.append(one)
            say(f"round {number} of {num_rounds}: {one}")
    return [*_saturation(rounds, best), *_lone_requests(rounds)]


def _running_server(folder: Path) -> AbstractContextManager[Server]:
    return running_server(folder / "model", folder, max_batch_tokens=_SERVED_BATCH_TOKENS)


def _best_size(bare: Bare, texts: Sequence[str], say: Say) -> int:
    """Return the tokens per batch at which the bare model is fastest."""
    bare.forward(texts[:_NUM_WARMING], batch_tokens=max(_BARE_BATCH_TOKENS))
    speeds = {size: len(texts) / bare.forward(texts, batch_tokens=size) for size in _BARE_BATCH_TOKENS}
    say("bare, by tokens of a batch: " + ", ".join(f"{size}: {speed:.3g} texts/s" for size, speed in speeds.items()))
    return max(speeds, key=lambda size: speeds[size])


def _measure(
    server: Server, bare: Bare, texts: Sequence[str], *, batch_tokens: int, num_lone: int, server_first: bool
) -> _Round:
    """Measure all texts at once, then one text at a time, in turns."""
    ways = {
        "bare": lambda: len(texts) / bare.forward(texts, batch_tokens=batch_tokens),
        "server": lambda: len(texts) / server.score(texts),
    }
    server.score(texts[:_NUM_WARMING])  # opens connections, warms up the models
    bare.forward(texts[:_NUM_WARMING], batch_tokens=batch_tokens)
    order = ("server", "bare") if server_first else ("bare", "server")
    speeds = {name: ways[name]() for name in order}
    lone_text = texts[0][:256]
    lone = Rounds(
        {
            "bare": lambda: 1000 * bare.forward([lone_text], batch_tokens=batch_tokens),
            "server": lambda: 1000 * server.score([lone_text]),
        },
        num_rounds=num_lone,
    )
    return _Round(
        server=speeds["server"],
        bare=speeds["bare"],
        lone_ms=lone.median("server"),
        bare_lone_ms=lone.median("bare"),
    )


def _saturation(rounds: Sequence[_Round], best: int) -> Iterator[Line]:
    ratios = [one.ratio for one in rounds]
    lower, _, upper = quantiles(ratios, method="inclusive")
    yield Bar(name="server / best bare forward, saturated", value=median(ratios), unit="x", goal=0.85, better="higher")
    yield Fact(name="lower quartile of the rounds' ratios", value=lower, unit="x")
    yield Fact(name="upper quartile", value=upper, unit="x")
    yield Fact(name="server", value=median(one.server for one in rounds), unit="texts/s")
    yield Fact(name="best bare forward", value=median(one.bare for one in rounds), unit="texts/s")
    yield Fact(name="tokens of a batch in it", value=best, unit="")


def _lone_requests(rounds: Sequence[_Round]) -> Iterator[Line]:
    max_delay_ms = schema.RewardServer.model_fields["max_delay_ms"].default
    over = median(one.lone_ms - one.bare_lone_ms - max_delay_ms for one in rounds)
    yield Bar(name="lone request over bare + max delay, p50", value=over, unit="ms", goal=5.0, better="lower")
    yield Fact(name="lone request, p50", value=median(one.lone_ms for one in rounds), unit="ms")
    yield Fact(name="bare forward of it, p50", value=median(one.bare_lone_ms for one in rounds), unit="ms")
