"""vLLM in process (AsyncLLM): the front end runs on our event loop, the model in processes that vLLM starts.

    generate ──► AsyncLLM ──zmq──► EngineCore process: scheduler, model, our weight transfer (`workers.weight_transfer`)

What is decided here, and why:

- One request a sample, and only its final output: with n > 1 vLLM's last output need not hold all samples.
- Log-probs are the *processed* ones, of the distribution really sampled from.
- A load keeps the requests in flight with their keys and values. New requests never read what was cached before the
  load: the cache's salt is the version under which a request was made (the cache itself cannot be emptied while
  requests hold blocks of it).
- Weights come by reload alone, so vLLM starts with dummy ones. No sample may be asked for before the first `load`.
- Samples carry no seed: a seeded request whose prompt is prefilled in two parts kills vLLM 0.32's engine on CPUs.
- On a CPU, and not tensor-parallel, the model runs inside the EngineCore process: a third process costs 10 s more
  to start, and on few cores 10 % of the throughput.

Blocks on vLLM's start (`worker.start_timeout_s`), and on a load or sign of life for `_ANSWER_S` at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.config import schema
from streamrl.errors import ConfigError, EngineError, ResourceError, SampleError
from streamrl.wire.group import FinishReason, Span
from workers.engines.base import EngineSettings, EngineStats, Generated, SampleRequest
from workers.vllm_plugin import OWNER_VARIABLE, WEIGHT_TRANSFER_BACKEND

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_ANSWER_S = 120.0  # the engine answers between two steps; none takes so long
_STOP_S = 5
_CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default on a CPU is nearly all memory
_MAX_SEQUENCES = 1024


class VllmEngine:
    def __init__(self, settings: EngineSettings) -> None:
        check_installed()
        self._settings = settings
        # The processes that vLLM starts die with the thread that started them (see vllm_plugin), so it must stay.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._llm: AsyncLLM | None = None
        self._version = 0
        self._in_flight = 0
        self._num_tokens = 0

    async def start(self) -> None:
        timeout_s = self._settings.config.worker.start_timeout_s
        building = asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        try:
            await asyncio.wait_for(building, timeout_s)
        except TimeoutError:
            raise ResourceError(
                f"vLLM did not start within worker.start_timeout_s={timeout_s:g}; its own log says what it was doing"
            ) from None

    def _build(self) -> None:
        # Not as the executor's result: its future would keep the engine until the interpreter falls apart.
        self._llm = _build(self._settings)

    async def load(self, weights: Path, *, version: int, step: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._answering(f"load version {version}") as llm:
            # Not llm.pause_generation: it sleeps for 20 ms with the engine paused.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(weights)}))
            await llm.finish_weight_update(f"{version}:{step}")
            self._version = version
            await llm.resume_generation()

    async def generate(self, request: SampleRequest) -> Generated:
        assert self._version, "a sample was asked for before any version was loaded"
        self._in_flight += 1
        try:
            output = await self._complete(request)
        finally:
            self._in_flight -= 1
        self._num_tokens += len(output.token_ids)
        return self._generated(output, request.sampling)

    async def check_alive(self) -> None:
        async with self._answering("say that it lives") as llm:
            await llm.get_weight_version()

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, partial(llm.shutdown, timeout=_STOP_S))
        # A start that hangs cannot be joined; a thread that has shut vLLM down is idle, and lets go of it by ending.
        self._thread.shutdown(wait=llm is not None)

    def stats(self) -> EngineStats:
        return EngineStats(in_flight=self._in_flight, num_tokens=self._num_tokens)

    @asynccontextmanager
    async def _answering(self, what: str) -> AsyncIterator[AsyncLLM]:
        """Whatever goes wrong inside, a missing answer included, leaves an engine nobody may use."""
        assert self._llm is not None, "the engine was not started"
        try:
            async with asyncio.timeout(_ANSWER_S):
                yield self._llm
        except TimeoutError:
            raise EngineError(f"vLLM did not {what} within {_ANSWER_S:g} s") from None
        except Exception as error:  # vLLM's own errors share no base
            raise EngineError(f"vLLM could not {what}: {error}") from error

    async def _complete(self, request: SampleRequest) -> CompletionOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None, "the engine was not started"
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self._version))
        outputs = self._llm.generate(prompt, self._params(request.sampling), request.request_id)
        try:
            final = [output async for output in outputs]  # to the end: what is left half-read is aborted, at a cost
        except (VLLMValidationError, ValueError) as error:
            raise SampleError(f"vLLM refused a sample: {error}") from error
        except Exception as error:  # EngineDeadError, EngineGenerateError, and what else a dying engine raises
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
        if not final or not final[-1].finished:
            raise EngineError("vLLM ended a request without its output")
        return final[-1].outputs[0]

    def _params(self, sampling: schema.Sampling) -> SamplingParams:
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

    def _generated(self, output: CompletionOutput, sampling: schema.Sampling) -> Generated:
        token_ids = list(output.token_ids)
        # With stop strings vLLM has made the text already, and knows which of them ended it.
        decode = self._settings.model.tokenizer.decode
        text = output.text if sampling.stop else decode(token_ids, skip_special_tokens=True)
        return Generated(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=_sampled_logprobs(output),
            text=text,
            finish_reason=_finish_reason(output),
            spans=_spans(output, len(token_ids)),
        )


def check_installed(
    *, find: Callable[[str], object | None] = find_spec, plugins: Iterable[EntryPoint] | None = None
) -> None:
    """ResourceError without vLLM, or where vLLM would not find our part of it."""
    if find("vllm") is None:
        raise ResourceError(
            "worker.engine=vllm but vLLM is not installed: pip install 'streamrl[worker-cpu]' (or worker-gpu), "
            "or set worker.engine=transformers"
        )
    if plugins is None:
        plugins = entry_points(group="vllm.general_plugins")
    if not any(plugin.value.startswith("workers.vllm_plugin:") for plugin in plugins):
        raise ResourceError(
            "vLLM does not know of streamrl's weight transfer, which it finds through an entry point of the installed "
            "package: run from an installation (pip install -e .), not from a bare checkout"
        )


def _build(settings: EngineSettings) -> AsyncLLM:
    """Runs in the engine's own thread: imports vLLM, starts its processes, returns when the model stands."""
    os.environ.update(_environment(settings.config.worker))
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.abstract import Executor
    except ImportError as error:
        raise ResourceError(f"worker.engine=vllm, but vLLM cannot be imported: {error}") from error

    arguments = engine_args(settings, on_cpu=current_platform.is_cpu())
    refuse_unknown(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    os.environ.update(_platform_environment(arguments, settings.config.worker, on_cpu=current_platform.is_cpu()))
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM refuses this model or worker.engine_args: {error}") from error
    try:
        return AsyncLLM(config, Executor.get_class(config), log_stats=False, log_requests=False)
    except Exception as error:  # vLLM's own errors share no base
        raise EngineError(f"vLLM did not start: {error}") from error


def refuse_unknown(arguments: Iterable[str], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"worker.engine_args.{name}: vLLM has no such argument{hint}")


def _environment(worker: schema.Worker) -> dict[str, str]:
    """What must stand before vLLM is imported; its processes inherit it."""
    wanted = {
        OWNER_VARIABLE: str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    if worker.threads:
        wanted["OMP_NUM_THREADS"] = str(worker.threads)
    return wanted


def _platform_environment(arguments: Mapping[str, Any], worker: schema.Worker, *, on_cpu: bool) -> dict[str, str]:
    wanted = {}
    if arguments["enforce_eager"]:
        # Even then vLLM compiles a helper of the sampler: 10 s in the middle of the first batch, for nothing.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if on_cpu and arguments.get("tensor_parallel_size", 1) == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what vLLM calls this: the model runs in the EngineCore process
    if on_cpu and worker.threads:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return wanted


def engine_args(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Ours, the user's over our defaults; what correctness hangs on is not for the user to change."""
    config = settings.config
    sampling = config.sampling.num_samples * config.worker.max_groups_in_flight
    defaults: dict[str, Any] = {
        "max_model_len": settings.max_length,
        "max_num_seqs": min(sampling, _MAX_SEQUENCES),
        "enforce_eager": on_cpu,
    }
    if on_cpu:
        defaults["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    fixed: dict[str, Any] = {
        "model": settings.model.path,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": config.weights.dtype,
        "seed": settings.seed,
        "load_format": "dummy",
        "generation_config": "vllm",  # none of the model's own: sampling is the run's alone
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "disable_log_stats": True,
    }
    for name in config.worker.engine_args:
        if name in fixed:
            raise ConfigError(f"worker.engine_args.{name}: streamrl sets this itself; remove it")
    return {**defaults, **config.worker.engine_args, **fixed}


def _sampled_logprobs(output: CompletionOutput) -> np.ndarray[Any, np.dtype[np.float32]]:  # [T]
    logprobs = output.logprobs
    assert logprobs is not None, "log-probs were asked for"
    # Flat, and one entry a position: the sampled token's.
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
