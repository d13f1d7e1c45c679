"""An engine on plain transformers, for machines without vLLM and for tests. Small, not fast.

    generate ──► rows ──► one thread: one token for every row ─► finished rows out ─► repeat while there are rows
    load, read back ... ──► the same thread, between two steps

The thread owns the model. Samples join the batch as they arrive and leave it as they finish. A load happens between two
steps; rows keep their KV cache unless it asks to recompute it. Any failure in the thread ends the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import nn
from transformers.initialization import no_init_weights

from streamrl.errors import DataError, EngineError, SampleError
from streamrl.tasks import cancel_all
from streamrl.workers.engines.base import (
    Engine,
    EngineSettings,
    EngineStats,
    Generated,
    Load,
    ReadBack,
    SampleRequest,
)
from streamrl.workers.engines.decoder import Decoder, Row
from streamrl.workers.engines.hf_model import build_model

T = TypeVar("T")

_ANSWER_S = 120.0  # for a load or a liveness check, which wait for one step of the batch


class TransformersEngine(Engine):
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._max_length = settings.max_length
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self._decoder: Decoder | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._rows: set[Row] = set()  # in flight
        self._arrived = asyncio.Event()  # set while there are rows
        self._is_busy = False
        self._dead: EngineError | None = None

    async def start(self) -> None:
        timeout_s = self._settings.config.worker.start_timeout_s
        try:
            self._decoder = await asyncio.wait_for(self._in_thread(partial(_build, self._settings)), timeout_s)
        except TimeoutError:
            raise EngineError(f"the model did not load within worker.start_timeout_s={timeout_s:g}; raise it") from None
        self._decoding = asyncio.create_task(self._decode(self._decoder), name="decode")

    async def load(self, load: Load) -> None:
        # Only `clear` needs work: there is no cache beyond the rows in the batch.
        task = partial(
            self._started.load, load.weights, version=load.version, step=load.step, recompute=load.kv_cache == "clear"
        )
        await self._busy(task, f"load version {load.version}")

    async def load_decoy(self, weights: Path) -> None:
        await self._busy(partial(self._started.load_decoy, weights), "load a decoy")

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        read_back = partial(self._started.read_back, weights, number=number, num_parts=num_parts)
        return await self._busy(read_back, "return its weights for the read-back")

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        values = await self._answer(partial(self._started.logprobs, token_ids.tolist()), "compute log-probs")
        return np.asarray(values, dtype=np.float32)

    async def generate(self, request: SampleRequest) -> Generated:
        room = self._max_length - len(request.prompt_ids)
        if room < 1:
            raise SampleError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response within {self._max_length}"
            )
        if self._dead is not None:
            raise self._dead
        done = asyncio.get_running_loop().create_future()
        row = Row(request=request, max_tokens=min(request.sampling.max_tokens, room), done=done)
        self._started.arrived.append(row)
        self._rows.add(row)
        self._arrived.set()
        try:
            return await row.done
        finally:
            row.abandoned = True
            self._rows.discard(row)

    async def check_alive(self) -> None:
        await self._answer(lambda: None, "answer")

    async def stop(self) -> None:
        self._die(EngineError("the engine was stopped"))
        if self._decoding is not None:
            await cancel_all([self._decoding])
        self._thread.shutdown(wait=False, cancel_futures=True)  # a thread in a long step exits after it

    def stats(self) -> EngineStats:
        decoder = self._decoder
        return EngineStats(
            in_flight=len(self._rows),
            num_made=decoder.num_made if decoder else 0,
            num_waiting=max(0, len(self._rows) - (len(decoder.rows) if decoder else 0)),
            kv_used=0.0,  # memory is allocated on demand
            is_busy=self._is_busy,
        )

    @property
    def _started(self) -> Decoder:
        assert self._decoder is not None, "the engine was not started"
        return self._decoder

    async def _decode(self, decoder: Decoder) -> None:
        """Step until the engine is dead; by then every pending row has its exception."""
        while self._dead is None:
            await self._arrived.wait()
            try:
                finished = await self._in_thread(decoder.step)
            except EngineError:
                return
            for row, generated in finished:
                if not row.done.done():  # cancelled meanwhile
                    row.done.set_result(generated)
            if decoder.idle:
                self._arrived.clear()

    async def _busy(self, run: Callable[[], T], what: str) -> T:
        """Like `_answer`, for what the thread does instead of generating; one at a time."""
        self._is_busy = True
        try:
            return await self._answer(run, what)
        finally:
            self._is_busy = False

    async def _answer(self, run: Callable[[], T], what: str) -> T:
        try:
            return await asyncio.wait_for(self._in_thread(run), _ANSWER_S)
        except TimeoutError:
            raise EngineError(f"the transformers engine did not {what} within {_ANSWER_S:g} s") from None

    async def _in_thread(self, run: Callable[[], T]) -> T:
        if self._dead is not None:
            raise self._dead
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, torch.inference_mode()(run))
        except DataError:
            raise  # from the model's folder
        except Exception as error:
            structlog.get_logger().exception("engine_thread_failed")
            raise self._die(EngineError(f"transformers failed: {error}")) from error

    def _die(self, error: EngineError) -> EngineError:
        self._dead = self._dead or error
        for row in self._rows:
            if not row.done.done():
                row.done.set_exception(self._dead)
        return self._dead


def _build(settings: EngineSettings) -> Decoder:
    if settings.config.worker.threads:
        torch.set_num_threads(settings.config.worker.threads)
    dtype = getattr(torch, settings.config.weights.dtype)
    # Weights stay uninitialised: a load precedes their first use.
    model: nn.Module = build_model(settings.model, dtype=dtype, within=no_init_weights())
    return Decoder(model.to("cuda" if torch.cuda.is_available() else "cpu"), settings)
