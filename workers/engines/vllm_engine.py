"""vLLM in process (AsyncLLM): the front end runs on our event loop, the model in processes that vLLM starts.

    generate ──► AsyncLLM ──zmq──► EngineCore process: scheduler, model, weight transfer (`vllm_weights`)

What is decided here, and why:

- One request a sample, and only its final output: with n > 1 vLLM's last output need not hold all samples.
- Log-probs are the *processed* ones, of the distribution really sampled from.
- The cache at a load. salt: from now on requests have another salt. clear: vLLM's own reset, which sends what runs back
  to the queue, to be prefilled again. keep: neither.
- Weights come by loads alone, so vLLM starts with dummy ones; what changed since the last load goes into their place,
  where the engine has one for it (`vllm_in_place`). No sample may be asked for before the first `load`.
- Samples carry no seed: a seeded request whose prompt is prefilled in two parts kills vLLM 0.32's engine on CPUs.
- On a CPU an engine of one rank runs the model inside the EngineCore process: a third process costs 10 s more to
  start, and on few cores 10 % of the throughput. With more ranks (`tensor_parallel_size`, `pipeline_parallel_size`)
  EngineCore has a process for each, which loads, proves and answers for its own part of the model.
- Over several hosts (`worker.hosts`) the further ones start their ranks by themselves (`vllm_headless`), and each rank
  loads from its own host's mirror. When one of these hosts is lost, EngineCore is killed, and its ranks with it.

Blocks on vLLM's start (`worker.start_timeout_s`), and on a load or sign of life for `_ANSWER_S` at most.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.config.routers import wants_routes
from streamrl.errors import ConfigError, EngineError, ResourceError, SampleError
from streamrl.held_folders import scratch_folder
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.sample import FinishReason, Span
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
from streamrl.workers.engines.routes import routes_of_vllm, shape_of_vllm
from streamrl.workers.engines.vllm_forked import look_after_server
from streamrl.workers.engines.vllm_in_place import InPlace
from streamrl.workers.engines.vllm_plugin import PREPARE, READ_BACK
from streamrl.workers.engines.vllm_ranks import remove_shared
from streamrl.workers.engines.vllm_start import StepWatch, build_llm, check_installed

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_ANSWER_S = 120.0  # the engine answers between two steps; none takes so long
_STOP_S = 1  # then it is killed: a worker that was told to stop leaves within 3 s of its grace
_SOON, _SOONER, _SOONEST = 2, 1, 0  # vLLM's priorities: training, evaluation, canaries


class VllmEngine(Engine):
    def __init__(self, settings: EngineSettings) -> None:
        check_installed()
        if (num_hosts := settings.config.worker.hosts) > 1 and settings.hosts is None:
            raise ConfigError(
                f"worker.hosts = {num_hosts}: only a worker has an engine over several hosts; set worker.hosts=1 here, "
                "and worker.engine_args for the GPUs of this host"
            )
        self._settings = settings
        # The processes that vLLM starts die with the thread that started them (see vllm_plugin), so it must stay.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._scratch = ExitStack()
        self._in_place = InPlace()
        self._llm: AsyncLLM | None = None
        self._watch = StepWatch()
        self._version = 0
        self._salt = ""  # requests read from the cache only what requests of the same salt put there
        self._num_salts = 0
        self._in_flight = 0
        self._num_canaries = 0
        self._watching: asyncio.Task[None] | None = None
        self._lost = ""  # which further host, and why

    async def start(self) -> None:
        timeout_s = self._settings.config.worker.start_timeout_s
        look_after_server()  # here and not in `_thread`, with which it would end
        meeting = None
        if (hosts := self._settings.hosts) is not None:
            meeting = await hosts.begin(self._settings.seed)
            self._watching = asyncio.create_task(self._end_with(hosts), name="further hosts of the engine")
        building = asyncio.get_running_loop().run_in_executor(self._thread, self._build, meeting)
        try:
            await asyncio.wait_for(building, timeout_s)
        except TimeoutError:
            raise ResourceError(
                f"vLLM did not start within worker.start_timeout_s={timeout_s:g}; its own log says what it was doing"
            ) from None
        except EngineError as error:
            raise self._caused(error) from error
        if self.bare().vllm_config.parallel_config.world_size > 1:
            async with self._answering("prepare its ranks") as llm:
                ranks = await llm.collective_rpc(PREPARE)
                here = ranks[: len(ranks) // self._settings.config.worker.hosts]  # the first ones
                self._scratch.callback(remove_shared, {name for rank in here for name in rank})

    def _build(self, meeting: Meeting | None) -> None:
        # Not as the executor's result: its future would keep the engine until the interpreter falls apart.
        self._llm, self._watch = build_llm(self._settings, self._scratch.enter_context(scratch_folder()), meeting)

    async def _end_with(self, hosts: FurtherHosts) -> None:
        """vLLM would wait for a host that is gone, for minutes or for ever; without its EngineCore all calls fail."""
        self._lost = await hosts.lost()
        for child in multiprocessing.active_children():
            if child.name.startswith("EngineCore"):
                child.kill()

    def _caused(self, error: EngineError) -> EngineError:
        return EngineError(self._lost) if self._lost else error

    async def load(self, load: Load) -> None:
        weights, version = load.weights, load.version
        async with self._answering(f"load version {version}") as llm:
            patch = await self._in_place.patch(load.changed, weights)
            # Not llm.pause_generation: it sleeps for 20 ms with the engine paused.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=load.kv_cache == "clear")
            info = {"path": str(weights), "version": version, "patch": None if patch is None else str(patch)}
            await _update(llm, info, label=f"{version}:{load.step}")
            self._version = version
            if load.kv_cache == "salt":
                # A version that was refused is loaded again, and what its first load made is not to be read.
                self._num_salts += 1
                self._salt = f"{version}:{self._num_salts}"
            await llm.resume_generation()
            await self._in_place.loaded(llm, weights, version, patch)

    async def load_decoy(self, weights: Path) -> None:
        self._in_place.lose()
        async with self._answering("load a decoy") as llm:
            await _update(llm, {"path": str(weights), "decoy": True}, label="0:0")

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        async with self._answering("be read back") as llm:
            ranks = await llm.collective_rpc(READ_BACK, args=(str(weights), number, num_parts))
        ends = [self._end_of(rank, len(ranks)) for rank in range(len(ranks))]
        return ReadBack(
            num_read=sum(found["num_read"] for found in ranks),
            wrong=tuple(sorted(name + end for end, found in zip(ends, ranks, strict=True) for name in found["wrong"])),
            unreadable=tuple(sorted({name for found in ranks for name in found["unreadable"]})),
        )

    def _end_of(self, rank: int, num_ranks: int) -> str:
        if num_ranks == 1:
            return ""
        hosts = self._settings.hosts
        node = rank * self._settings.config.worker.hosts // num_ranks
        return f" of rank {rank}" + ("" if hosts is None else hosts.named(node))

    async def generate(self, request: SampleRequest) -> Generated:
        assert self._version, "a sample was asked for before any version was loaded"
        sampling = request.sampling
        priority = _SOONER if request.urgent else _SOON
        self._in_flight += 1
        try:
            final = await self._final(
                request.prompt_ids, self.sampling_params(sampling), request.request_id, priority, salt=self._salt
            )
        finally:
            self._in_flight -= 1
        output = final.outputs[0]
        token_ids = list(output.token_ids)
        return Generated(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=_sampled_logprobs(output),
            # With stop strings vLLM has made the text already, and knows which of them ended it.
            text=output.text if sampling.stop else self._settings.model.decode(token_ids),
            finish_reason=_finish_reason(output),
            spans=_spans(output, len(token_ids)),
            routes=self._routes(output, len(request.prompt_ids) + len(token_ids)),
        )

    def _routes(self, output: CompletionOutput, num_tokens: int) -> Routes | None:
        if not (wants_routes(self._settings.config) and output.token_ids):
            return None
        shape = shape_of_vllm(self.bare().model_config)
        return routes_of_vllm(output.routed_experts, shape, num_tokens=num_tokens - 1)

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._num_canaries += 1
        async with self._answering("give log-probs"):
            output = await self._final(token_ids, _canary_params(), f"canary-{self._num_canaries}", _SOONEST)
        positions = output.prompt_logprobs
        assert positions is not None, "log-probs of the prompt were asked for"
        ids = token_ids.tolist()
        values = [at[token].logprob for at, token in zip(positions[1:], ids[1:], strict=True) if at is not None]
        return np.minimum(np.asarray(values, dtype=np.float32), 0.0)

    def bare(self) -> AsyncLLM:
        """For who measures what this file adds to it."""
        assert self._llm is not None, "the engine was not started"
        return self._llm

    async def check_alive(self) -> None:
        async with self._answering("say that it lives") as llm:
            await llm.get_weight_version()

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if self._watching is not None:
            await cancel_all([self._watching])
            assert self._settings.hosts is not None, "they are watched"
            self._settings.hosts.end()
        if llm is not None:
            await _stop_reading(llm)
            await asyncio.get_running_loop().run_in_executor(self._thread, partial(llm.shutdown, timeout=_STOP_S))
        # A start that hangs cannot be joined; a thread that has shut vLLM down is idle, and lets go of it by ending.
        self._thread.shutdown(wait=llm is not None)
        self._scratch.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            in_flight=self._in_flight,
            num_made=self._watch.num_made,
            num_waiting=max(0, self._in_flight - self._watch.num_running),
            kv_used=self._watch.kv_used,
        )

    @asynccontextmanager
    async def _answering(self, what: str) -> AsyncIterator[AsyncLLM]:
        """Whatever goes wrong inside, a missing answer included, leaves an engine nobody may use."""
        assert self._llm is not None, "the engine was not started"
        try:
            async with asyncio.timeout(_ANSWER_S):
                yield self._llm
        except TimeoutError:
            raise self._caused(EngineError(f"vLLM did not {what} within {_ANSWER_S:g} s")) from None
        except Exception as error:  # vLLM's own errors share no base
            raise self._caused(EngineError(f"vLLM could not {what}: {error}")) from error

    async def _final(
        self,
        token_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        request_id: str,
        priority: int,
        *,
        salt: str = "",
    ) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None, "the engine was not started"
        prompt = tokens_input(token_ids.tolist(), cache_salt=salt or None)
        outputs = self._llm.generate(prompt, params, request_id, priority=priority)
        try:
            final = [output async for output in outputs]  # to the end: what is left half-read is aborted, at a cost
        except (VLLMValidationError, ValueError) as error:
            raise SampleError(f"vLLM refused a sample: {error}") from error
        except Exception as error:  # EngineDeadError, EngineGenerateError, and what else a dying engine raises
            raise self._caused(EngineError(f"vLLM failed: {type(error).__name__}: {error}")) from error
        if not final or not final[-1].finished:
            raise EngineError("vLLM ended a request without its output")
        return final[-1]

    def sampling_params(self, sampling: schema.Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        model = self._settings.model
        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=list(sampling.stop),
            stop_token_ids=[i for i in model.stop_ids if i != model.tokenizer.eos_token_id],
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),  # token by token only where stop strings need it
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )


async def _stop_reading(llm: AsyncLLM) -> None:
    """Before it is shut down: else it may take its end for the engine's death, which it prints with a traceback."""
    if llm.output_handler is not None:
        await cancel_all([llm.output_handler])
        llm.output_processor.propagate_error(EngineError("the engine was stopped"))


async def _update(llm: AsyncLLM, info: dict[str, Any], *, label: str) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
    await llm.finish_weight_update(label)


def _canary_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM makes at least one
        prompt_logprobs=0,  # of the given tokens alone; with these vLLM reads nothing from its cache
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(output: CompletionOutput) -> npt.NDArray[np.float32]:  # [T]
    from vllm.logprobs import FlatLogprobs

    logprobs = output.logprobs
    assert isinstance(logprobs, FlatLogprobs), "flat log-probs were asked for"
    # One entry a position: the sampled token's.
    values = np.asarray(logprobs.logprobs, dtype=np.float32)[: len(output.token_ids)]
    assert len(values) == len(output.token_ids), f"{len(values)} log-probs for {len(output.token_ids)} tokens"
    return np.minimum(values, 0.0)


def _finish_reason(output: CompletionOutput) -> FinishReason:
    if output.finish_reason == "stop":
        return "stop"
    if output.finish_reason == "length":
        return "length"
    raise SampleError(f"vLLM ended a sample with {output.finish_reason!r}")


def _spans(output: CompletionOutput, num_tokens: int) -> tuple[Span, ...]:
    """vLLM's labels are ours, `version:step`; a stop string may cut tokens off that a span still counts."""
    spans = []
    for labelled in output.weight_versions or ():
        version, _, step = labelled.version.partition(":")
        end = min(labelled.end, num_tokens)
        if labelled.start < end:
            spans.append(Span(version=int(version), step=int(step), start=labelled.start, end=end))
    assert num_tokens == (spans[-1].end if spans else 0), f"spans {spans} do not cover {num_tokens} tokens"
    return tuple(spans)
