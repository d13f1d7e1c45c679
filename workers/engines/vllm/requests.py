"""A request to vLLM: the parameters of a sample or a canary, its priority, and its salt of the prefix cache. And what
its finished output holds: a sample with logprobs, finish reason, and which version generated which token; or a canary's
logprobs. Blocks while the scheduler is being paused, until the salt is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.protocol.wire.routes import Routes, RouteShape
from streamrl.protocol.wire.sample import FinishReason, Span
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.engines.routes import routes_of_vllm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

TRAINING, EVALUATION, CANARY = 2, 1, 0  # vLLM's priorities


def sampling_params(sampling: schema.Sampling, model: ModelFacts) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=[i for i in model.stop_ids if i != model.tokenizer.eos_token_id],
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # incremental detokenization only for stop strings
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def canary_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM's minimum
        prompt_logprobs=0,  # of the given tokens only; also makes vLLM bypass its prefix cache
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class CacheSalt:
    """A request reuses only entries of the prefix cache that were made under its own salt.

    pause begins ──► requests wait ──► scheduler paused, new salt ──► requests go on, prefilled under new weights
    """

    def __init__(self) -> None:
        self._salt = ""
        self._num_salts = 0
        self._is_known = asyncio.Event()  # of the weights under which a request would be prefilled
        self._is_known.set()

    async def known(self) -> str:
        """Return the salt of a request that is made now; wait while the scheduler is being paused."""
        await self._is_known.wait()
        return self._salt

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Let requests wait meanwhile."""
        self._is_known.clear()
        try:
            yield
        finally:
            self._is_known.set()

    def renew(self, version: int) -> None:
        # A rejected version is loaded again, and cache entries of its first load must not be read.
        self._num_salts += 1
        self._salt = f"{version}:{self._num_salts}"


def sample_of(final: RequestOutput, request: SampleRequest, model: ModelFacts, shape: RouteShape | None) -> Generated:
    """`shape`: of the routes, if the run records them."""
    output = final.outputs[0]
    token_ids = list(output.token_ids)
    return Generated(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=_sampled_logprobs(output),
        # With stop strings, vLLM has already detokenized the text, and knows which stop string ended it.
        text=output.text if request.sampling.stop else model.decode(token_ids),
        finish_reason=_finish_reason_of(output),
        spans=_spans_of(output, len(token_ids)),
        routes=_routes_of(output, shape, len(request.prompt_ids) + len(token_ids)),
    )


def given_logprobs(final: RequestOutput, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:  # [T-1]
    """Return the logprobs of a canary's tokens, of all but the first."""
    positions = final.prompt_logprobs
    assert positions is not None, "log-probs of the prompt were requested"
    ids = token_ids.tolist()
    values = [
        position[token].logprob for position, token in zip(positions[1:], ids[1:], strict=True) if position is not None
    ]
    return np.minimum(np.asarray(values, dtype=np.float32), 0.0)


def _sampled_logprobs(output: CompletionOutput) -> npt.NDArray[np.float32]:  # [T]
    from vllm.logprobs import FlatLogprobs

    logprobs = output.logprobs
    assert isinstance(logprobs, FlatLogprobs), "flat log-probs were requested"
    # One entry per position: the sampled token's.
    values = np.asarray(logprobs.logprobs, dtype=np.float32)[: len(output.token_ids)]
    assert len(values) == len(output.token_ids), f"{len(values)} log-probs for {len(output.token_ids)} tokens"
    return np.minimum(values, 0.0)


def _finish_reason_of(output: CompletionOutput) -> FinishReason:
    if output.finish_reason == "stop":
        return "stop"
    if output.finish_reason == "length":
        return "length"
    raise SampleError(f"vLLM ended a sample with {output.finish_reason!r}")


def _spans_of(output: CompletionOutput, num_tokens: int) -> tuple[Span, ...]:
    """Parse our `version:step` labels from vLLM's output. A stop string may cut tokens off that a span still counts."""
    spans = []
    for labelled in output.weight_versions or ():
        version, _, step = labelled.version.partition(":")
        end = min(labelled.end, num_tokens)
        if labelled.start < end:
            spans.append(Span(version=int(version), step=int(step), start=labelled.start, end=end))
    assert num_tokens == (spans[-1].end if spans else 0), f"spans {spans} do not cover {num_tokens} tokens"
    return tuple(spans)


def _routes_of(output: CompletionOutput, shape: RouteShape | None, num_tokens: int) -> Routes | None:
    if shape is None or not output.token_ids:
        return None
    return routes_of_vllm(output.routed_experts, shape, num_tokens=num_tokens - 1)
