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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from streamrl.errors import DataError, EngineError, ResourceError, SampleError
from streamrl.wire.group import FinishReason, Span
from workers.engines.base import EngineSettings, EngineStats, Generated, SampleRequest
from workers.engines.kv_batch import KvBatch
from workers.engines.sampling import RowState, choose, processed_logprobs

_MAX_ROWS = 256
_ANSWER_S = 120.0  # for a load or a sign of life: they wait for one step of the batch
_STOP_S = 5.0  # a thread in a long step ends after it; it is a daemon
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class _Row:
    """A sample at work."""

    request: SampleRequest
    max_tokens: int
    done: asyncio.Future[Generated]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    stop_string: str = ""  # the one that ended it
    abandoned: bool = False  # set by the event loop, read between steps

    def state(self) -> RowState:
        sampling = self.request.sampling
        penalised = sampling.repetition_penalty != 1.0
        seen = [*self.request.prompt_ids.tolist(), *self.token_ids] if penalised else ()
        return RowState(sampling=sampling, num_tokens=len(self.token_ids), seen=seen)

    def append(self, token_id: int, logprob: float, version: int, step: int) -> None:
        at = len(self.token_ids)
        start = at
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(Span(version=version, step=step, start=start, end=at + 1))
        self.token_ids.append(token_id)
        self.logprobs.append(min(logprob, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """Something to do between two steps."""

    run: Callable[[], None]
    done: asyncio.Future[None]


class TransformersEngine:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._max_length = settings.max_length
        self._commands: queue.SimpleQueue[_Row | _Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineError | None = None
        self._stopping = False
        self._in_flight = 0
        self._num_tokens = 0
        # The thread's own.
        self._model: nn.Module | None = None
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._version, self._step = 0, 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        timeout_s = self._settings.config.worker.start_timeout_s
        try:
            await asyncio.wait_for(self._command(lambda: None), timeout_s)
        except TimeoutError:
            raise ResourceError(f"the model did not load within worker.start_timeout_s={timeout_s:g}") from None

    async def load(self, weights: Path, *, version: int, step: int) -> None:
        def swap() -> None:
            assert self._model is not None
            _load_weights(self._model, weights)
            self._version, self._step = version, step

        await self._answer(swap, f"load version {version}")

    async def generate(self, request: SampleRequest) -> Generated:
        room = self._max_length - len(request.prompt_ids)
        if room < 1:
            raise SampleError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room in {self._max_length}")
        assert self._loop is not None, "the engine was not started"
        row = _Row(request=request, max_tokens=min(request.sampling.max_tokens, room), done=self._loop.create_future())
        self._in_flight += 1
        self._commands.put(row)
        self._check()
        try:
            generated = await row.done
        finally:
            row.abandoned = True
            self._in_flight -= 1
        self._num_tokens += len(generated.token_ids)
        return generated

    async def check_alive(self) -> None:
        await self._answer(lambda: None, "answer")

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._stopping = True
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, _STOP_S)

    def stats(self) -> EngineStats:
        return EngineStats(in_flight=self._in_flight, num_tokens=self._num_tokens)

    async def _answer(self, run: Callable[[], None], what: str) -> None:
        try:
            await asyncio.wait_for(self._command(run), _ANSWER_S)
        except TimeoutError:
            raise EngineError(f"the transformers engine did not {what} within {_ANSWER_S:g} s") from None

    async def _command(self, run: Callable[[], None]) -> None:
        assert self._loop is not None, "the engine was not started"
        command = _Command(run=run, done=self._loop.create_future())
        self._commands.put(command)
        self._check()
        await command.done

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            self._model = _build_model(self._settings)
            device = next(self._model.parameters()).device
            generator = torch.Generator(device=device).manual_seed(self._settings.seed)
            batch = KvBatch(self._model, device)
            with torch.inference_mode():
                while not self._stopping:
                    self._take_commands()
                    self._drop_abandoned(batch)
                    self._decode(batch, generator)
        except Exception as error:  # noqa: BLE001 - the thread's edge: logged, and told to all who wait
            structlog.get_logger().exception("engine_thread_failed")
            self._fail(error)
        else:
            self._fail(EngineError("the engine was stopped"))

    def _take_commands(self) -> None:
        """All that wait; blocks for one when there is nothing else to do."""
        idle = not (self._rows or self._waiting)
        while not self._stopping:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if isinstance(command, _Row):
                self._waiting.append(command)
            elif command is not None:
                self._obey(command)

    def _obey(self, command: _Command) -> None:
        try:
            command.run()
        except Exception as error:
            self._tell(command.done, EngineError(f"transformers failed: {error}"))
            raise
        self._tell(command.done, None)

    def _drop_abandoned(self, batch: KvBatch) -> None:
        self._waiting = [row for row in self._waiting if not row.abandoned]
        self._keep(batch, [i for i, row in enumerate(self._rows) if not row.abandoned])

    def _decode(self, batch: KvBatch, generator: torch.Generator) -> None:
        """The next token of every row, and the first one of those that there is room for."""
        logits = []
        if self._rows:
            last = torch.tensor([row.token_ids[-1] for row in self._rows], device=generator.device)
            logits.append(batch.step(last))
        if new := self._waiting[: _MAX_ROWS - len(self._rows)]:
            del self._waiting[: len(new)]
            logits.append(batch.add([row.request.prompt_ids.tolist() for row in new]))
            self._rows += new
        if not logits:
            return
        states = [row.state() for row in self._rows]
        logprobs = processed_logprobs(torch.cat(logits), states, self._settings.model.stop_ids)
        tokens = choose(logprobs, states, generator)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        going_on = []
        for i, (row, token_id, logprob) in enumerate(zip(self._rows, tokens.tolist(), chosen.tolist(), strict=True)):
            row.append(token_id, logprob, self._version, self._step)
            if (reason := self._finish_reason(row)) is None:
                going_on.append(i)
            else:
                self._tell(row.done, self._generated(row, reason))
        self._keep(batch, going_on)

    def _keep(self, batch: KvBatch, kept: list[int]) -> None:
        if len(kept) < len(self._rows):
            self._rows = [self._rows[i] for i in kept]
            batch.keep(kept)

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        if row.token_ids[-1] in self._settings.model.stop_ids:
            return "stop"
        if row.request.sampling.stop and len(row.token_ids) > row.request.sampling.min_tokens:
            row.stop_string = self._completed_stop_string(row)
            if row.stop_string:
                return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    def _completed_stop_string(self, row: _Row) -> str:
        """The stop string that the last token completed, if it did."""
        stop = row.request.sampling.stop
        # A token may hold no whole character, so that a string may be spread over more tokens than it is long.
        tail = row.token_ids[-4 * max(map(len, stop)) - 8 :]
        before, after = self._decode_text(tail[:-1]), self._decode_text(tail)
        return next((s for s in stop if after.find(s, max(0, len(before) - len(s) + 1)) >= 0), "")

    def _decode_text(self, token_ids: list[int]) -> str:
        text: str = self._settings.model.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _generated(self, row: _Row, reason: FinishReason) -> Generated:
        text = self._decode_text(row.token_ids)
        if row.stop_string:
            text = text[: text.rindex(row.stop_string)]
        return Generated(
            token_ids=np.asarray(row.token_ids, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            text=text,
            finish_reason=reason,
            spans=tuple(row.spans),
        )

    def _fail(self, error: Exception) -> None:
        failure = error if isinstance(error, EngineError | DataError) else EngineError(f"transformers failed: {error}")
        failure.__cause__ = None if failure is error else error
        self._dead = failure if isinstance(failure, EngineError) else EngineError(str(failure))
        waiting = [row.done for row in [*self._rows, *self._waiting]]
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    waiting.append(command.done)
        for future in waiting:
            self._tell(future, failure)

    def _tell(self, future: asyncio.Future, outcome: object) -> None:
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


def _build_model(settings: EngineSettings) -> nn.Module:
    if settings.config.worker.threads:
        torch.set_num_threads(settings.config.worker.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model.path,
            dtype=_DTYPES[settings.config.weights.dtype],
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise DataError(f"model {settings.model.path!r} cannot be loaded: {error}") from error
    built: nn.Module = model.to(device).eval()
    return built


def _load_weights(model: nn.Module, path: Path) -> None:
    """All parameters, in place; a tied head is the embedding itself and comes with it."""
    weights = load_file(path)
    parameters = dict(model.named_parameters())
    if missing := parameters.keys() - weights.keys():
        raise EngineError(f"{path} lacks {len(missing)} parameters, {min(missing)} for one")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
