"""What vLLM is told of a request: the parameters of a sample or a canary, and its priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.workers.engines.model import ModelFacts

if TYPE_CHECKING:
    from vllm import SamplingParams

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
