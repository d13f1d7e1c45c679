"""vLLM's own arguments that would break a worker's promises are refused before anything starts, with what to set."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.check import _gpus as check_gpus
from streamrl.config.check import check_config
from streamrl.config.engine_args import QUANTIZED, check_engine_args, quantized_as, ranks_in
from streamrl.config.placement import gpus_of_worker
from streamrl.config.schema import Weights
from streamrl.errors import ConfigError
from tests.worker_world import worker_config


def told(dtype: str = "bfloat16", *, engine: str = "vllm", **arguments: Any) -> list[str]:
    config = worker_config(engine=engine, engine_args=arguments)
    config = config.model_copy(update={"weights": Weights.model_validate({"dtype": dtype})})
    return [f"{found.key} = {found.value}: {found.remedy}" for found in check_engine_args(config)]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("nnodes", 2, "set worker.hosts, and start `streamrl worker --join`"),
        ("master_addr", "10.0.0.1", "streamrl sets it itself on each host"),
        ("distributed_executor_backend", "ray", "would not end with this worker"),
        ("data_parallel_size", 2, "set worker.count = 2 instead"),
        ("enable_eplb", True, "moves experts"),
        ("quantization", "awq", "must be one of fp8_per_tensor, fp8_per_channel, fp8_per_block"),
        ("quantization_config", {"linear": "mxfp8"}, "mixed forms cannot be proved"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_set_instead(name: str, value: Any, remedy: str) -> None:
    [found] = told(**{name: value})
    assert found.startswith(f"worker.engine_args.{name} = {value}: ")
    assert remedy in found
    assert told(engine="transformers", **{name: value}) == []


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (-1, "allow 48 tokens, and with -1 vLLM takes what fits its memory, be it less: set it to at least 65, or"),
        (0, "set it to at least 65"),
        (47, "data.max_prompt_tokens and sampling.max_tokens together allow 48 tokens, and vLLM would cut off"),
        (48, "the check of each version of the weights needs 65 tokens: set it to at least that, or remove it"),
        (64, "the check of each version of the weights needs 65 tokens"),
    ],
)
def test_a_length_that_does_not_hold_every_sample_and_the_canary_is_refused(given: int, remedy: str) -> None:
    [found] = told(max_model_len=given)
    assert found.startswith(f"worker.engine_args.max_model_len = {given}: ")
    assert remedy in found


def test_a_length_that_holds_them_is_let_through_and_without_proofs_that_of_the_samples_is_enough() -> None:
    assert told(max_model_len=65) == []
    assert told(max_model_len=None) == []
    config = worker_config(engine="vllm", engine_args={"max_model_len": 48})
    unproved = config.model_copy(update={"weights": Weights(dtype="bfloat16", prove=False)})
    assert list(check_engine_args(unproved)) == []


def test_ranks_of_one_host_are_let_through_and_counted() -> None:
    spread = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "enable_expert_parallel": True}
    assert told(**spread, distributed_executor_backend="mp", data_parallel_size=1, enable_eplb=False) == []
    assert ranks_in(spread) == 8
    assert ranks_in({}) == 1


def test_hosts_of_one_engine_share_its_ranks_evenly_and_vllm_alone_spans_several() -> None:
    def refused(**worker: Any) -> list[str]:
        config = worker_config(**worker)
        return [f"{found.key} = {found.value}: {found.remedy}" for found in check_engine_args(config)]

    four = {"tensor_parallel_size": 4}
    assert refused(hosts=2, engine_args=four) == []
    assert refused(hosts=2, engine_args={"pipeline_parallel_size": 2}) == []
    assert refused(hosts=2, gpus=4) == []
    [found] = refused(hosts=3, engine_args=four)
    assert found.startswith("worker.hosts = 3: does not divide the 4 ranks of worker.engine_args")
    [found] = refused(hosts=2)
    assert "the 1 ranks" in found
    [found] = refused(hosts=2, engine="transformers")
    assert found.startswith("worker.hosts = 2: worker.engine = transformers runs on one host only")
    [found] = refused(hosts=2, engine_args={**four, "distributed_executor_backend": "uni"})
    assert "supports one rank only" in found

    assert ranks_in(four) == 4
    assert gpus_of_worker(worker_config(hosts=2, engine_args=four).worker) == 2
    assert gpus_of_worker(worker_config(hosts=2, gpus=8).worker) == 8


def test_gpus_of_a_worker_are_those_of_each_host() -> None:
    def refused(size: int) -> list[str]:
        config = worker_config(hosts=2, gpus=4, engine_args={"tensor_parallel_size": size})
        return [found.remedy for found in check_gpus(config)]

    assert refused(8) == []
    assert refused(4) == [
        "worker.engine_args spread each worker over 4 GPUs, on worker.hosts = 2; remove one of the two settings"
    ]


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_model_is_quantised_of_bfloat16_alone(form: str) -> None:
    assert told(quantization=form) == []
    [found] = told("float32", quantization=form)
    assert found == f"weights.dtype = float32: worker.engine_args.quantization = {form} needs bfloat16 weights: " + (
        "set it to bfloat16"
    )
    assert quantized_as(worker_config(engine="vllm", engine_args={"quantization": form}).worker) == form
    assert quantized_as(worker_config(engine="transformers", engine_args={"quantization": form}).worker) is None


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_token_of_the_hub_is_refused_and_not_shown(engine: str) -> None:
    [found] = told(engine=engine, hf_token="secret")
    assert found.startswith("worker.engine_args.hf_token = ***: the run's folder and Redis would hold it")
    assert "set HF_TOKEN in each worker's environment" in found
    assert told(hf_token=True) == [], "the one that the machine has"


def test_a_runs_configuration_is_checked_for_it() -> None:
    config = worker_config(engine="vllm", engine_args={"nnodes": 2})
    with pytest.raises(ConfigError, match=r"worker\.engine_args\.nnodes = 2: "):
        check_config(config)
