"""The arguments that a vLLM engine is built with: our defaults, the user's `worker.engine_args`, and what nobody may
change; and which arguments are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from streamrl.config import schema
from streamrl.config.engine_args import PROOF_LENGTH, check_engine_args, quantized_as
from streamrl.config.placement import parallel_in
from streamrl.errors import ConfigError
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.routes import vllm_args
from streamrl.workers.engines.vllm.plugin import WEIGHT_TRANSFER_BACKEND, WORKER_EXTENSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default on a CPU is nearly all memory
_MAX_SEQUENCES = 1024


def engine_args(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Merge our defaults, the user's settings, and arguments that correctness depends on, which users cannot set."""
    config = settings.config
    # The last ticket may exceed the bound by all its samples but one; and a seat for a canary (`Seats`).
    seats = config.sampling.num_samples * (config.worker.max_groups_in_flight + 1)
    defaults: dict[str, Any] = {
        "max_model_len": max(settings.max_length, min(PROOF_LENGTH, settings.model.max_positions or PROOF_LENGTH)),
        "max_num_seqs": min(seats, _MAX_SEQUENCES),
        "enforce_eager": on_cpu,
        # The files that the learner reads, where a folder of Mistral's also has those of another form.
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "worker_extension_cls": WORKER_EXTENSION,  # a user's own class must derive from it, since proofs call it
    }
    route_args = vllm_args(config, on_cpu=on_cpu)
    if on_cpu:
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    else:
        defaults |= _gpu_args(settings)
    fixed: dict[str, Any] = {
        "model": settings.model.path,
        "trust_remote_code": settings.model.trust_remote_code,
        "dtype": config.weights.dtype,
        "seed": settings.seed,
        "load_format": "dummy",
        "generation_config": "vllm",  # not the model's own: sampling settings come from the run
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "scheduling_policy": "priority",
        **route_args,
    }
    for name in config.worker.engine_args:
        if name in fixed:
            raise ConfigError(f"worker.engine_args.{name}: streamrl sets this itself; remove it")
    for found in check_engine_args(config):  # again here: another process started the run
        raise ConfigError(f"{found.key} = {found.value}: {found.remedy}")
    if on_cpu:
        _refuse_on_cpu(config.worker)
    return {**defaults, **_with_canary(_with_draft_weights(config.worker.engine_args)), **fixed}


def _gpu_args(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments that depend on the GPUs `streamrl up` gave this worker."""
    worker, found = settings.config.worker, {}
    if worker.gpus != "auto" and worker.gpus * worker.hosts > 1:
        found["tensor_parallel_size"] = worker.gpus * worker.hosts // parallel_in(worker)
    return found if settings.gpu_memory is None else {**found, "gpu_memory_utilization": settings.gpu_memory}


def _with_canary(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add a seat for a canary to the number of samples that the user set; each of its tokens has to fit a step."""
    seats = {name: arguments.get(name) for name in ("max_num_seqs", "max_num_active_seqs")}
    raised = {name: given + 1 for name, given in seats.items() if isinstance(given, int)}
    batched = arguments.get("max_num_batched_tokens")
    if isinstance(batched, int) and batched == arguments.get("max_num_seqs"):
        raised["max_num_batched_tokens"] = batched + 1
    return {**arguments, **raised}


def samples_at_once(config: VllmConfig) -> int:
    """Return how many samples vLLM can have if a seat is left for a canary."""
    scheduler = config.scheduler_config
    return (scheduler.max_num_active_seqs or scheduler.max_num_seqs) - 1


def _with_draft_weights(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Have vLLM load a draft model from its own folder. Else it gets the model's load format: random weights, whose
    drafts would never be accepted; the model's own come from the learner."""
    speculation = arguments.get("speculative_config")
    if not isinstance(speculation, Mapping):
        return dict(arguments)
    own = {"draft_load_config": {"load_format": "auto"}}
    return {**arguments, "speculative_config": {**own, **speculation}}


def _refuse_on_cpu(worker: schema.Worker) -> None:
    """ConfigError for arguments that vLLM's build for CPUs accepts, and cannot do."""
    if quantized_as(worker) not in (None, "fp8_per_channel"):
        raise ConfigError(
            f"worker.engine_args.quantization = {quantized_as(worker)}: vLLM's build for CPUs has no kernel for it; "
            "set fp8_per_channel, or remove it"
        )
    if worker.engine_args.get("enable_expert_parallel"):
        raise ConfigError(
            "worker.engine_args.enable_expert_parallel: vLLM's kernel for CPUs needs all experts of a layer, and dies "
            "with only some of them; remove it: with tensor_parallel_size alone each rank has a part of each expert"
        )
    if worker.engine_args.get("speculative_config"):
        raise ConfigError(
            "worker.engine_args.speculative_config: vLLM's build for CPUs draws wrong tokens when it speculates at a "
            "temperature above 0; remove it"
        )


def refuse_unknown(arguments: Iterable[str], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"worker.engine_args.{name}: vLLM has no such argument{hint}")


def several_hosts(worker: schema.Worker, meeting: Meeting) -> dict[str, Any]:
    return {
        "nnodes": worker.hosts,
        "node_rank": meeting.node,
        "master_addr": meeting.address,
        "master_port": meeting.port,
        "distributed_executor_backend": "mp",
    }
