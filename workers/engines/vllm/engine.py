"""vLLM in process (AsyncLLM): the front end runs on our event loop, the model in processes that vLLM starts.

    generate ──► AsyncLLM ──zmq──► EngineCore process: scheduler, model, weight transfer (`loading.transfer`)

Decisions, and why:

- One request per sample, and only its final output: with n > 1, vLLM's last output need not hold all samples.
- Logprobs are the *processed* ones, of the distribution actually sampled from.
- KV cache at a load. salt: requests use a new cache salt once the scheduler is paused; those that come while it is
  being paused wait until it is (`requests`). clear: vLLM's own reset, which preempts running requests and prefills them
  again. keep: neither.
- vLLM has a seat more than samples may take: the canary's. Samples without a seat wait here (`seats`), not in vLLM.
- Weights arrive only through loads, so vLLM starts with dummy weights. Deltas are written in place where the engine
  supports it (`in_place`). Do not request samples before the first `load`.
- Samples carry no seed: a seeded request whose prompt is prefilled in two chunks kills vLLM 0.32's engine on CPUs.
- On a CPU, an engine of one rank runs the model inside the EngineCore process: a third process costs 10 s more to
  start, and on few cores 10 % of the throughput. With more ranks (`tensor_parallel_size`, `pipeline_parallel_size`)
  EngineCore starts a process for each, which loads and proves its own shard of the model.
- Across hosts (`worker.hosts`), each further host starts its own ranks (`headless`), and each rank loads from its own
  host's mirror. If one of these hosts is lost, EngineCore is killed, and its ranks with it.

Blocks on vLLM's start (`worker.start_timeout_s`), and on a load or liveness check for at most `answer_limit_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamrl.config.routers import wants_routes
from streamrl.errors import ConfigError, EngineError, SampleError
from streamrl.held_folders import scratch_folder
from streamrl.tasks import cancel_all
from streamrl.workers.engines.base import (
    Engine,
    EngineSettings,
    EngineStats,
    FurtherHosts,
    Generated,
    Load,
    Meeting,
    ReadBack,
    SampleRequest,
)
from streamrl.workers.engines.routes import shape_of_vllm
from streamrl.workers.engines.vllm.arguments import samples_at_once
from streamrl.workers.engines.vllm.forked import look_after_server
from streamrl.workers.engines.vllm.in_place import InPlace
from streamrl.workers.engines.vllm.plugin import PREPARE, READ_BACK
from streamrl.workers.engines.vllm.ranks import remove_shared
from streamrl.workers.engines.vllm.requests import (
    CANARY,
    EVALUATION,
    TRAINING,
    CacheSalt,
    canary_params,
    given_logprobs,
    sample_of,
    sampling_params,
)
from streamrl.workers.engines.vllm.seats import Seats
from streamrl.workers.engines.vllm.start import build_llm, check_installed, kill_engine_core, stop_reading
from streamrl.workers.engines.vllm.steps import StepWatch

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_ANSWER_S = 120.0  # the engine answers between two steps, and no step takes this long
_LOADED_PER_S = 500e6  # bytes: a decoy is made by one thread of each rank, here at 1.9e9, and then copied
_STOP_S = 1  # then it is killed: a stopped worker must exit within 3 s after its grace period


def answer_limit_s(weights: Path) -> float:
    """How long an engine that may be loading this file has to answer."""
    return _ANSWER_S + weights.stat().st_size / _LOADED_PER_S


class VllmEngine(Engine):
    def __init__(self, settings: EngineSettings) -> None:
        check_installed()
        if (num_hosts := settings.config.worker.hosts) > 1 and settings.hosts is None:
            raise ConfigError(
                f"worker.hosts = {num_hosts}: only a worker can run an engine over several hosts; set worker.hosts=1 "
                "here, and worker.engine_args for the GPUs of this host"
            )
        self._settings = settings
        # The kernel kills vLLM's processes when the thread that started them ends (see `plugin`), so it must stay.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._scratch = ExitStack()
        self._in_place = InPlace()
        self._llm: AsyncLLM | None = None
        self._watch = StepWatch()
        self._version = 0
        self._salt = CacheSalt()
        self._in_flight = 0
        self._seats = Seats(0)  # until vLLM is built
        self._answer_s = _ANSWER_S
        self._is_busy = False
        self._num_canaries = 0
        self._watching_hosts: asyncio.Task[None] | None = None
        self._lost = ""  # which further host was lost, and why

    async def start(self) -> None:
        timeout_s = self._settings.config.worker.start_timeout_s
        look_after_server()  # not in `_thread`: the server would end with it
        meeting = None
        if (hosts := self._settings.hosts) is not None:
            meeting = await hosts.begin(self._settings.seed)
            self._watching_hosts = asyncio.create_task(self._end_with_hosts(hosts), name="further hosts of the engine")
        building = asyncio.get_running_loop().run_in_executor(self._thread, self._build, meeting)
        try:
            await asyncio.wait_for(building, timeout_s)
        except TimeoutError:
            kill_engine_core()  # or the next engine would start beside it; the thread that waits for it then gives up
            raise EngineError(
                f"vLLM did not start within worker.start_timeout_s={timeout_s:g}; raise it, or see vLLM's own log"
            ) from None
        except EngineError as error:
            raise self._with_cause(error) from error
        if self.bare().vllm_config.parallel_config.world_size > 1:
            async with self._answering("prepare its ranks") as llm:
                ranks = await llm.collective_rpc(PREPARE)
                own_ranks = ranks[: len(ranks) // self._settings.config.worker.hosts]  # this host's ranks come first
                self._scratch.callback(remove_shared, {name for rank in own_ranks for name in rank})

    def _build(self, meeting: Meeting | None) -> None:
        # Not returned through the executor: its future would keep the engine alive until interpreter shutdown.
        self._llm, self._watch = build_llm(self._settings, self._scratch.enter_context(scratch_folder()), meeting)
        self._seats = Seats(samples_at_once(self._llm.vllm_config))

    async def _end_with_hosts(self, hosts: FurtherHosts) -> None:
        """Kill EngineCore once a host is lost, so that all calls fail; vLLM itself could wait for it forever."""
        self._lost = await hosts.lost()
        kill_engine_core()

    def _with_cause(self, error: EngineError) -> EngineError:
        return EngineError(self._lost) if self._lost else error

    async def load(self, load: Load) -> None:
        weights, version = load.weights, load.version
        self._answer_s = answer_limit_s(weights)
        async with self._busy(f"load version {version}") as llm:
            patch = await self._in_place.patch(load.changed, weights)
            await self._pause(llm, load)
            info = {"path": str(weights), "version": version, "patch": None if patch is None else str(patch)}
            await _update(llm, info, label=f"{version}:{load.step}")
            self._version = version
            await llm.resume_generation()
            await self._in_place.loaded(llm, weights, version, patch)

    async def _pause(self, llm: AsyncLLM, load: Load) -> None:
        """Pause the scheduler, and salt later requests anew: it prefills them under the new weights."""
        with self._salt.pausing():
            # Not llm.pause_generation: it sleeps 20 ms with the engine paused.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=load.kv_cache == "clear")
            if load.kv_cache == "salt":
                self._salt.renew(load.version)

    async def load_decoy(self, weights: Path) -> None:
        self._in_place.invalidate()
        self._answer_s = answer_limit_s(weights)
        async with self._busy("load a decoy") as llm:
            await _update(llm, {"path": str(weights), "decoy": True}, label="0:0")

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        async with self._busy("return its weights for the read-back") as llm:
            ranks = await llm.collective_rpc(READ_BACK, args=(str(weights), number, num_parts))
        suffixes = [self._rank_suffix(rank, len(ranks)) for rank in range(len(ranks))]
        return ReadBack(
            num_read=sum(found["num_read"] for found in ranks),
            wrong=tuple(
                sorted(name + suffix for suffix, found in zip(suffixes, ranks, strict=True) for name in found["wrong"])
            ),
            unreadable=tuple(sorted({name for found in ranks for name in found["unreadable"]})),
        )

    def _rank_suffix(self, rank: int, num_ranks: int) -> str:
        if num_ranks == 1:
            return ""
        hosts = self._settings.hosts
        node = rank * self._settings.config.worker.hosts // num_ranks
        return f" of rank {rank}" + ("" if hosts is None else hosts.named(node))

    async def generate(self, request: SampleRequest) -> Generated:
        assert self._version, "a sample was requested before any version was loaded"
        priority = EVALUATION if request.urgent else TRAINING
        self._in_flight += 1
        try:
            async with self._seats.taken(priority):
                salt = await self._salt.known()
                make_params = partial(sampling_params, request.sampling, self._settings.model)
                final = await self._final(request.prompt_ids, make_params, request.request_id, priority, salt=salt)
        finally:
            self._in_flight -= 1
        routes = shape_of_vllm(self.bare().model_config) if wants_routes(self._settings.config) else None
        return sample_of(final, request, self._settings.model, routes)

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._num_canaries += 1
        async with self._answering("compute log-probs"):
            output = await self._final(token_ids, canary_params, f"canary-{self._num_canaries}", CANARY)
        return given_logprobs(output, token_ids)

    def bare(self) -> AsyncLLM:
        """Return vLLM's object, for benchmarks that measure what this class adds to it."""
        assert self._llm is not None, "the engine was not started"
        return self._llm

    async def check_alive(self) -> None:
        async with self._answering("answer a liveness check") as llm:
            await llm.get_weight_version()

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if self._watching_hosts is not None:
            await cancel_all([self._watching_hosts])
            assert self._settings.hosts is not None, "only an engine with further hosts watches them"
            self._settings.hosts.end()
        if llm is not None:
            await stop_reading(llm)
            await asyncio.get_running_loop().run_in_executor(self._thread, partial(llm.shutdown, timeout=_STOP_S))
        # Do not join a start that hangs. After a shutdown the thread is idle, and drops vLLM as it ends.
        self._thread.shutdown(wait=llm is not None)
        self._scratch.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            in_flight=self._in_flight,
            num_made=self._watch.num_made,
            num_waiting=max(0, self._in_flight - self._watch.num_running),
            kv_used=self._watch.kv_used,
            is_busy=self._is_busy,
            drafts_accepted=self._watch.drafts_accepted,
        )

    @asynccontextmanager
    async def _busy(self, what: str) -> AsyncIterator[AsyncLLM]:
        """Like `_answering`, for what the engine does instead of generating; one at a time."""
        self._is_busy = True
        try:
            async with self._answering(what) as llm:
                yield llm
        finally:
            self._is_busy = False

    @asynccontextmanager
    async def _answering(self, what: str) -> AsyncIterator[AsyncLLM]:
        """Turn any failure inside, a timeout included, into an EngineError: the engine is unusable afterwards."""
        assert self._llm is not None, "the engine was not started"
        try:
            async with asyncio.timeout(self._answer_s):
                yield self._llm
        except TimeoutError:
            raise self._with_cause(EngineError(f"vLLM did not {what} within {self._answer_s:g} s")) from None
        except Exception as error:  # vLLM's own errors have no common base
            raise self._with_cause(EngineError(f"vLLM could not {what}: {error}")) from error

    async def _final(
        self,
        token_ids: npt.NDArray[np.int32],
        make_params: Callable[[], SamplingParams],
        request_id: str,
        priority: int,
        *,
        salt: str = "",
    ) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None, "the engine was not started"
        prompt = tokens_input(token_ids.tolist(), cache_salt=salt or None)
        try:
            outputs = self._llm.generate(prompt, make_params(), request_id, priority=priority)
            final = [output async for output in outputs]  # to the end: leaving early aborts the request, at a cost
        except (VLLMValidationError, ValueError) as error:
            raise SampleError(f"vLLM refused a sample: {error}") from error
        except Exception as error:  # EngineDeadError, EngineGenerateError, and anything else a dying engine raises
            raise self._with_cause(EngineError(f"vLLM failed: {type(error).__name__}: {error}")) from error
        if not final or not final[-1].finished:
            raise EngineError("vLLM ended a request without its output")
        if final[-1].outputs[0].finish_reason == "abort":  # we never abort one that we still wait for
            raise EngineError("vLLM is ending, and has aborted its requests")
        return final[-1]


async def _update(llm: AsyncLLM, info: dict[str, Any], *, label: str) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
    await llm.finish_weight_update(label)
