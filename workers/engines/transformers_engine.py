"""Plain transformers behind the engine's seam: for machines without vLLM, and for tests. Small, not fast.

    generate, load ──commands──► one thread: admit rows ─► a token for every row ─► finished rows out ─► again
                                                 ▲ between two steps: new weights, abandoned rows

The thread owns the model. Samples join the batch as they come and leave it as they end; a load happens between two
steps, and rows keep their keys and values.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import nn

from streamrl.errors import DataError, EngineError, ResourceError, SampleError
from workers.engines.base import EngineSettings, EngineStats, Generated, KvCache, ReadBack, SampleRequest
from workers.engines.decoder import Decoder, Row
from workers.engines.hf_model import build_model

_ANSWER_S = 120.0  # for a load or a sign of life: they wait for one step of the batch
_STOP_S = 1.0  # a thread in a long step ends after it; it is a daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """Something to do between two steps."""

    run: Callable[[Decoder], object]
    done: asyncio.Future[Any]


class TransformersEngine:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._max_length = settings.max_length
        self._commands: queue.SimpleQueue[Row | _Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineError | None = None
        self._stopping = False
        self._in_flight = 0
        self._decoder: Decoder | None = None  # the thread's own; others read its counts

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        timeout_s = self._settings.config.worker.start_timeout_s
        try:
            await asyncio.wait_for(self._command(lambda decoder: None), timeout_s)
        except TimeoutError:
            raise ResourceError(f"the model did not load within worker.start_timeout_s={timeout_s:g}") from None

    async def load(self, weights: Path, *, version: int, step: int, kv_cache: KvCache = "salt") -> None:
        def load(decoder: Decoder) -> None:
            decoder.load(weights, version=version, step=step)
            if kv_cache == "clear":  # nothing is cached beyond the rows at work
                decoder.recompute()

        await self._answer(load, f"load version {version}")

    async def load_decoy(self, weights: Path) -> None:
        await self._answer(lambda decoder: decoder.load_decoy(weights), "load a decoy")

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        found: ReadBack = await self._answer(
            lambda decoder: decoder.read_back(weights, number=number, num_parts=num_parts), "be read back"
        )
        return found

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        values = await self._answer(lambda decoder: decoder.logprobs(token_ids.tolist()), "give log-probs")
        return np.asarray(values, dtype=np.float32)

    async def generate(self, request: SampleRequest) -> Generated:
        room = self._max_length - len(request.prompt_ids)
        if room < 1:
            raise SampleError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room in {self._max_length}")
        assert self._loop is not None, "the engine was not started"
        row = Row(request=request, max_tokens=min(request.sampling.max_tokens, room), done=self._loop.create_future())
        self._in_flight += 1
        self._commands.put(row)
        self._check()
        try:
            return await row.done
        finally:
            row.abandoned = True
            self._in_flight -= 1

    async def check_alive(self) -> None:
        await self._answer(lambda decoder: None, "answer")

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._stopping = True
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, _STOP_S)

    def stats(self) -> EngineStats:
        decoder = self._decoder
        at_work = len(decoder.rows) if decoder else 0
        return EngineStats(
            in_flight=self._in_flight,
            num_made=decoder.num_made if decoder else 0,
            num_waiting=max(0, self._in_flight - at_work),
            kv_used=0.0,  # memory is taken as it is needed
        )

    async def _answer(self, run: Callable[[Decoder], object], what: str) -> Any:
        try:
            return await asyncio.wait_for(self._command(run), _ANSWER_S)
        except TimeoutError:
            raise EngineError(f"the transformers engine did not {what} within {_ANSWER_S:g} s") from None

    async def _command(self, run: Callable[[Decoder], object]) -> Any:
        assert self._loop is not None, "the engine was not started"
        command = _Command(run=run, done=self._loop.create_future())
        self._commands.put(command)
        self._check()
        return await command.done

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            decoder = self._decoder = Decoder(_build(self._settings), self._settings)
            with torch.inference_mode():
                while not self._stopping:
                    self._take_commands(decoder)
                    decoder.drop_abandoned()
                    for row, generated in decoder.step():
                        self._tell(row.done, generated)
        except Exception as error:  # noqa: BLE001 - the thread's edge: logged, and told to all who wait
            structlog.get_logger().exception("engine_thread_failed")
            self._fail(error)
        else:
            self._fail(EngineError("the engine was stopped"))

    def _take_commands(self, decoder: Decoder) -> None:
        """All that wait; blocks for one when there is nothing else to do."""
        idle = decoder.idle
        while not self._stopping:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if isinstance(command, Row):
                decoder.admit(command)
            elif command is not None:
                self._obey(command, decoder)

    def _obey(self, command: _Command, decoder: Decoder) -> None:
        try:
            outcome = command.run(decoder)
        except Exception as error:
            self._tell(command.done, EngineError(f"transformers failed: {error}"))
            raise
        self._tell(command.done, outcome)

    def _fail(self, error: Exception) -> None:
        failure = error if isinstance(error, EngineError | DataError) else EngineError(f"transformers failed: {error}")
        failure.__cause__ = None if failure is error else error
        self._dead = failure if isinstance(failure, EngineError) else EngineError(str(failure))
        decoder = self._decoder
        waiting = [row.done for row in [*decoder.rows, *decoder.waiting]] if decoder else []
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    waiting.append(command.done)
        for future in waiting:
            self._tell(future, failure)

    def _tell(self, future: asyncio.Future[Any], outcome: object) -> None:
        def set_outcome() -> None:
            if future.done():  # cancelled meanwhile
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop ended, and with it whoever waited
            self._loop.call_soon_threadsafe(set_outcome)


def _build(settings: EngineSettings) -> nn.Module:
    if settings.config.worker.threads:
        torch.set_num_threads(settings.config.worker.threads)
    model = build_model(
        settings.model, dtype=settings.config.weights.dtype, trust_remote_code=settings.trust_remote_code
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
