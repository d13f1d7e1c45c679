"""Reads vLLM's finished outputs: logprobs, finish reason, and which version generated which token; and the parameters
of a canary, whose output is read alike. Blocks on nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamrl.errors import SampleError
from streamrl.protocol.wire.sample import FinishReason, Span

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput


def canary_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM's minimum
        prompt_logprobs=0,  # of the given tokens only; also makes vLLM bypass its prefix cache
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(output: CompletionOutput) -> npt.NDArray[np.float32]:  # [T]
    from vllm.logprobs import FlatLogprobs

    logprobs = output.logprobs
    assert isinstance(logprobs, FlatLogprobs), "flat log-probs were requested"
    # One entry per position: the sampled token's.
    values = np.asarray(logprobs.logprobs, dtype=np.float32)[: len(output.token_ids)]
    assert len(values) == len(output.token_ids), f"{len(values)} log-probs for {len(output.token_ids)} tokens"
    return np.minimum(values, 0.0)


def finish_reason_of(output: CompletionOutput) -> FinishReason:
    if output.finish_reason == "stop":
        return "stop"
    if output.finish_reason == "length":
        return "length"
    raise SampleError(f"vLLM ended a sample with {output.finish_reason!r}")


def spans_of(output: CompletionOutput, num_tokens: int) -> tuple[Span, ...]:
    """Parse our `version:step` labels from vLLM's output. A stop string may cut tokens off that a span still counts."""
    spans = []
    for labelled in output.weight_versions or ():
        version, _, step = labelled.version.partition(":")
        end = min(labelled.end, num_tokens)
        if labelled.start < end:
            spans.append(Span(version=int(version), step=int(step), start=labelled.start, end=end))
    assert num_tokens == (spans[-1].end if spans else 0), f"spans {spans} do not cover {num_tokens} tokens"
    return tuple(spans)
