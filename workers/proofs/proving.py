"""Proves that the engine serves what it was told to load. Digests verify the mirror; this verifies what comes after it.

    engine start ─► rehearsal: a decoy is loaded ─┐
    each version ─► loaded ─► read back ─► now and then, its canary ─► proved
                                │                    └─ the engine's logprobs of some tokens, against the mirror's own
                                └─ layers against the mirror, bit for bit: all at the first load, then some each time

Which check finds which fault:

                                         digests   cast (learner)   read-back   canary   mismatch (learner)
    bytes lost or changed on the way        x
    published what was not trained                       x
    a tensor left behind, swapped, scaled                               x       if visible
    the second reload does nothing                                      x          x
    the loader takes one for another                                               x           x
    the engine computes something else than transformers                           x           x
    the worker's model folder has another configuration                                        x

Digests: `weights.mirror`; cast: `learner.publishing.host_copy`; mismatch: `policy/fresh_mismatch` of the metrics.

**Read-back** compares bits (`read_back`), without a threshold, and reports what it cannot read. Every element of the
decoy differs from the model's, so a layer that a reload leaves behind is wrong wherever one looks.

**The canary** has a threshold, whose unit is measured at the same time: how far plain transformers in the served dtype
are from the truth on the same tokens (`reference`), rounded to eight bits for engines that quantise. The engine may be
`_FACTOR` times as far, in the mean over tokens; taking the maximum, or the first load as the unit, gave false alarms.
`python -m bench proofs` shows how far engines are, over families, depths and dtypes, and what the canary finds by
itself. It uses at most the share `_MAX_TIME_SHARE` of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from streamrl.config.engine_args import Form, quantized_as
from streamrl.config.schema import Config
from streamrl.errors import LoadRejected
from streamrl.protocol.weights.manifest import Manifest
from streamrl.telemetry.progress import Progress
from streamrl.versions import show
from streamrl.workers.engines.base import Engine
from streamrl.workers.engines.model import ModelFacts

log = structlog.get_logger(__name__)

_FACTOR = 3.0  # multiple of the rounding; over families, depths and versions engines were 0.77 to 1.53 times as far
_MIN_ALLOWED = 2e-2  # vLLM's soft caps are 1e-3 off in any dtype
_NUM_PARTS = 8  # after the first version, each read-back covers one of so many parts of the layers
_MAX_TIME_SHARE = 0.02  # of the time may be spent on canaries


def prover_of(config: Config, model: ModelFacts, progress: Progress) -> Prover:
    """Build the prover. Blocks on importing torch and transformers."""
    return Prover(model=model, dtype=config.weights.dtype, form=quantized_as(config.worker), progress=progress)


class Prover:
    """Checks one engine after the other."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        dtype: str,
        progress: Progress,
        form: Form | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`form`: the quantised form of the engine's weights, if any (`config.engine_args`)."""
        from streamrl.workers.proofs.reference import Reference  # lazy: imports torch and transformers

        self._reference = Reference(model, dtype=dtype, form=form)
        self._model, self._progress, self._clock = model, progress, clock
        self._trusted = False  # the engine passed its last check; if not, all of it is read back
        self._num_checked = 0
        self._next_canary_at = 0.0

    async def rehearse(self, engine: Engine, mirror: Path) -> None:
        """Load a decoy into a new engine, so that whatever a reload misses is wrong everywhere."""
        self._trusted = False
        await engine.load_decoy(mirror)

    async def check(self, engine: Engine, mirror: Path, manifest: Manifest) -> None:
        """Check the engine after a load. LoadRejected if it does not serve this version."""
        trusted, self._trusted = self._trusted, False
        self._num_checked += 1
        await self._read_back(engine, mirror, manifest, num_parts=_NUM_PARTS if trusted else 1)
        if manifest.canary_ids and (not trusted or self._clock() >= self._next_canary_at):
            await self._check_canary(engine, mirror, manifest)
        self._trusted = True

    async def _read_back(self, engine: Engine, mirror: Path, manifest: Manifest, *, num_parts: int) -> None:
        found = await engine.read_back(mirror, number=self._num_checked, num_parts=num_parts)
        if found.wrong:
            raise LoadRejected(
                f"version {show(manifest.version)}: {len(found.wrong)} of the {found.num_read} tensors read back from "
                f"the engine differ from those it was told to load, {found.wrong[0]} for one; none may differ"
            )
        if num_parts == 1:
            log.info("engine_read_back", num_read=found.num_read, unreadable=list(found.unreadable))

    async def _check_canary(self, engine: Engine, mirror: Path, manifest: Manifest) -> None:
        began = self._clock()
        token_ids = manifest.canary_ids
        if self._model.max_positions is not None:
            token_ids = token_ids[: self._model.max_positions - 1]  # the engine adds one
        logprobs = await engine.logprobs(np.asarray(token_ids, dtype=np.int32))
        judged = await asyncio.to_thread(self._reference.judge, mirror, token_ids)
        self._next_canary_at = self._clock() + (self._clock() - began) / _MAX_TIME_SHARE
        distance = float(np.abs(logprobs - judged.truth).mean())
        allowed = max(_MIN_ALLOWED, _FACTOR * judged.rounding)
        self._progress.note(rounding=judged.rounding, engine_off=distance)
        log.info("canary", version=show(manifest.version), off=distance, rounding=judged.rounding)
        if not distance <= allowed:
            raise LoadRejected(
                f"version {show(manifest.version)}: the engine's log-probs of the canary are {distance:.3g} away from "
                f"those of a plain forward pass in the mean; at most {allowed:.3g} is allowed (rounding: "
                f"{judged.rounding:.3g})"
            )
