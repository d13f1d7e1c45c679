"""Does the engine serve what it was told to load? Digests prove the mirror; this proves what comes after it.

    engine start ─► the probe is loaded, and must answer as a plain forward pass does ─► the version is loaded ─┐
    each version ─► its canary: the learner's tokens, whose log-probs by the learner the engine must repeat ◄───┘

What a canary can show. In fp32 learner and engine agree within 1e-4 (more, where the engine's own arithmetic was off
by more at its first load, which the probe has proved): then a step of training that did not arrive shows. In bf16 both
round, and the learner answers by its fp32 masters: the band is three times what the engine's first load was off, and
at least 0.2. Measured, the noise was 0.06, and a reload skipped for 50 steps at lr 1e-6 was off by 0.08: only gross
faults show (a foreign model, a tensor permuted or left behind since long), and digests and probe carry the proof.

A version without a canary (no learner's, or of tests) is proved by digests and probe alone. Blocks on the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog

from streamrl.errors import LoadRejected
from streamrl.versions import show
from streamrl.weights.manifest import Canary, Manifest
from workers.engines.base import Engine
from workers.model import ModelFacts

log = structlog.get_logger(__name__)

_FLOOR: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.2}  # a canary may always be off by so much
_CEILING: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 1.0}  # and never by more
_OVER_FIRST = 3.0  # times what the first load of the engine was off


class Proof(Protocol):
    """What the follower of weights asks."""

    async def probe(self, engine: Engine, mirror: Path, manifest: Manifest) -> None:
        """Once per engine, before anything is generated: LoadRejected where a reload does not do what it must."""

    async def check(self, engine: Engine, manifest: Manifest) -> None:
        """After each load: LoadRejected where the engine does not serve this version."""


class Prover:
    def __init__(self, *, model: ModelFacts, dtype: str, trust_remote_code: bool, with_probe: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._trust_remote_code = trust_remote_code
        self._with_probe = with_probe
        self._band: float | None = None  # None: until the engine's first canary

    async def probe(self, engine: Engine, mirror: Path, manifest: Manifest) -> None:
        self._band = None
        if not self._with_probe:
            return
        from workers.probe import make_probe  # torch and transformers: not where the probe is off

        probe = await asyncio.to_thread(
            make_probe,
            mirror,
            manifest.tensors,
            folder=mirror.parent,
            model=self._model,
            dtype=self._dtype,
            trust_remote_code=self._trust_remote_code,
        )
        try:
            await engine.load(probe.path, version=0, step=0)
            answered = await engine.logprobs(np.asarray(probe.token_ids, dtype=np.int32))
        finally:
            probe.path.unlink(missing_ok=True)
        probe.check(answered.tolist())
        log.info("reloads_proved", visible=round(probe.visible, 4), tolerance=round(probe.tolerance, 5))

    async def check(self, engine: Engine, manifest: Manifest) -> None:
        if manifest.canary is None:
            return
        answered = await engine.logprobs(np.asarray(manifest.canary.token_ids, dtype=np.int32))
        off = _worst(manifest.canary, answered.tolist())
        allowed = _CEILING[self._dtype] if self._band is None else self._band
        if not off <= allowed:
            raise LoadRejected(
                f"version {show(manifest.version)}: the engine's log-probs of the canary are {off:.3g} away from the "
                f"learner's, {allowed:.3g} is let pass"
            )
        if self._band is None:
            self._band = min(allowed, max(_FLOOR[self._dtype], _OVER_FIRST * off))


def _worst(canary: Canary, answered: list[float]) -> float:
    assert canary.logprobs is not None, "the learner has answered it"
    assert len(answered) == len(canary.logprobs), f"{len(answered)} log-probs for {len(canary.token_ids)} tokens"
    return max(abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(answered, canary.logprobs, strict=True))


class ProofDouble:
    """Believes everything but what tests tell it to refuse."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.canaries: list[Canary | None] = []  # of the versions that were checked
        self.refused: dict[int, int] = {}  # version -> how often it is refused still
        self.held: asyncio.Event | None = None  # checks wait for it

    async def probe(self, engine: Engine, mirror: Path, manifest: Manifest) -> None:
        self.num_probes += 1

    async def check(self, engine: Engine, manifest: Manifest) -> None:
        self.canaries.append(manifest.canary)
        if self.held is not None:
            await self.held.wait()
        if self.refused.get(manifest.version, 0) > 0:
            self.refused[manifest.version] -= 1
            raise LoadRejected(f"version {show(manifest.version)} was told to be refused")
