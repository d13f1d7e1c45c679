"""Checks vLLM's own arguments: which ones break a worker's guarantees, why, and what to set instead.

A worker is one engine, over as many GPUs as `worker.engine_args` say, of its host or of several (`worker.hosts`). The
weights are in each host's memory, its processes end with it, and each of them proves what it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal, get_args

from streamrl.config.explain import Problem
from streamrl.config.schema import Config, Worker
from streamrl.protocol.transport.address import HIDDEN

# Dimensions over which an engine's processes split the model.
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
_HOSTS = ("nnodes", "node_rank", "master_addr", "master_port", "data_parallel_address", "data_parallel_backend")
_SEVERAL = "remove it; for one engine over several hosts set worker.hosts, and start `streamrl worker --join` on them"
# Forms to which vLLM 0.32 quantises a model at load; the proofs know how far each is from the weights themselves.
Form = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
QUANTIZED: tuple[Form, ...] = get_args(Form)
PROOF_LENGTH = 65  # a load's canary (`workers.proofs.proving`), and the token that vLLM adds


def ranks_in(arguments: Mapping[str, Any]) -> int:
    """Return the number of processes of one engine, on all of its hosts."""
    return prod(size for name in _RANKS if isinstance(size := arguments.get(name, 1), int))


def quantized_as(worker: Worker) -> Form | None:
    """Return the form in which the engine keeps the model's layers; None: as published."""
    requested = worker.engine_args.get("quantization") if worker.engine == "vllm" else None
    return next((form for form in QUANTIZED if form == requested), None)


def check_engine_args(config: Config) -> Iterator[Problem]:
    worker, arguments = config.worker, config.worker.engine_args
    if isinstance(arguments.get("hf_token"), str):
        remedy = "the run's folder and Redis would hold it: remove it, and set HF_TOKEN in each worker's environment"
        yield Problem(key="worker.engine_args.hf_token", value=HIDDEN, remedy=remedy)
    if worker.engine != "vllm":
        if worker.hosts > 1:
            remedy = f"worker.engine = {worker.engine} runs on one host only: must be 1, or set worker.engine=vllm"
            yield Problem(key="worker.hosts", value=worker.hosts, remedy=remedy)
        return
    yield from _spread(arguments)
    yield from _ended_early(config)
    yield from _over_hosts(worker)
    yield from _quantized(config)


def _spread(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _HOSTS:
        if name in arguments:
            yield _refused(arguments, name, f"streamrl sets it itself on each host; {_SEVERAL}")
    backend = arguments.get("distributed_executor_backend")
    if backend not in (None, "mp", "uni"):
        remedy = f"its processes would not end with this worker; {_SEVERAL}"
        yield _refused(arguments, "distributed_executor_backend", remedy)
    if (size := arguments.get("data_parallel_size", 1)) not in (None, 1):
        remedy = (
            f"workers could prove the weights of the first engine only; set worker.count = {size} instead, and to "
            "spread experts over GPUs enable_expert_parallel with tensor_parallel_size"
        )
        yield _refused(arguments, "data_parallel_size", remedy)
    for name in ("enable_eplb", "enable_elastic_ep"):
        if arguments.get(name):
            remedy = "it moves experts at run time, but loading weights puts them back in their places; remove it"
            yield _refused(arguments, name, remedy)


def longest_response(config: Config) -> tuple[str, int]:
    """Return the most tokens that a ticket can ask for after its prompt, and the setting that allows them."""
    lengths = {"sampling.max_tokens": config.sampling.max_tokens}
    if config.environment is not None:
        lengths = {"environment.max_tokens": config.environment.max_tokens}
    elif config.data.validation is not None:
        lengths["validation.sampling.max_tokens"] = config.validation.sampling.max_tokens
    key = max(lengths, key=lengths.__getitem__)
    return key, lengths[key]


def _ended_early(config: Config) -> Iterator[Problem]:
    """Refuse what makes vLLM end responses earlier or later than the run's settings say, without a word."""
    arguments = config.worker.engine_args
    allowed = arguments.get("max_model_len")
    if isinstance(allowed, int) and (fault := _too_short(allowed, config)):
        yield _refused(arguments, "max_model_len", f"{fault}, or remove it, since the default is what samples need")
    if arguments.get("skip_tokenizer_init"):
        remedy = "remove it: vLLM would not know the tokenizer's end token, and every response would go on to its limit"
        yield _refused(arguments, "skip_tokenizer_init", remedy)


def _too_short(allowed: int, config: Config) -> str:
    """Return why this `max_model_len` does not hold all sequences, and what does; empty if it holds them."""
    key, response = longest_response(config)
    longest = config.data.max_prompt_tokens + response
    needed = max(longest, PROOF_LENGTH if config.weights.prove else 1)
    allow = f"data.max_prompt_tokens and {key} together allow {longest} tokens"
    if allowed < 1:
        return f"{allow}, and with -1 vLLM takes what fits its memory, be it less: set it to at least {needed}"
    if allowed < longest:
        return f"{allow}, and vLLM would cut off what is longer than this: raise it, make those smaller"
    if allowed < needed:
        return f"the check of each version of the weights needs {needed} tokens: set it to at least that"
    return ""


def _over_hosts(worker: Worker) -> Iterator[Problem]:
    num_ranks, gpus_are_set = ranks_in(worker.engine_args), worker.gpus != "auto" and worker.gpus > 0
    if num_ranks % worker.hosts and not gpus_are_set:
        remedy = (
            f"does not divide the {num_ranks} ranks of worker.engine_args: make tensor_parallel_size x "
            "pipeline_parallel_size a multiple of it, or set worker.gpus, the number per host"
        )
        yield Problem(key="worker.hosts", value=worker.hosts, remedy=remedy)
    if worker.hosts > 1 and worker.engine_args.get("distributed_executor_backend") == "uni":
        yield _refused(worker.engine_args, "distributed_executor_backend", "remove it: it supports one rank only")


def _quantized(config: Config) -> Iterator[Problem]:
    arguments = config.worker.engine_args
    form = arguments.get("quantization")
    if "quantization_config" in arguments:
        remedy = f"mixed forms cannot be proved; remove it, and set quantization to one of {', '.join(QUANTIZED)}"
        yield _refused(arguments, "quantization_config", remedy)
    if form is None:
        return
    if form not in QUANTIZED:
        remedy = (
            "workers cannot prove weights that vLLM quantises to this form; must be one of "
            f"{', '.join(QUANTIZED)}, or remove it"
        )
        yield _refused(arguments, "quantization", remedy)
    elif config.weights.dtype != "bfloat16":
        remedy = f"worker.engine_args.quantization = {form} needs bfloat16 weights: set it to bfloat16"
        yield Problem(key="weights.dtype", value=config.weights.dtype, remedy=remedy)


def _refused(arguments: Mapping[str, Any], name: str, remedy: str) -> Problem:
    return Problem(key=f"worker.engine_args.{name}", value=arguments[name], remedy=remedy)
