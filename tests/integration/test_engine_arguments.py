"""What vLLM makes of the arguments of an engine, asked of vLLM itself; no engine is started.

vLLM is imported where it is asked: with the module, each process of pytest would import it, for two seconds.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamrl.config.schema import Algorithm
from streamrl.errors import ConfigError
from streamrl.protocol.wire.routes import RouteShape
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.routes import routes_of_vllm, shape_of_vllm
from streamrl.workers.engines.vllm.arguments import engine_args, refuse_unknown
from streamrl.workers.engines.vllm.failure import cache_remedy
from streamrl.workers.engines.vllm.start import engine_config
from tests.tiny_families import make_family
from tests.tiny_models import make_model
from tests.worker_world import worker_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def own_args() -> Any:
    """vLLM's class of them."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs


def args_on_an_h100() -> Any:
    """As far as vLLM's defaults go, which it takes from the name and the memory of the GPU."""
    from vllm.usage.usage_lib import UsageContext

    class OnAnH100(own_args()):
        @classmethod
        def get_batch_defaults(cls, world_size: int) -> tuple[dict[Any, int], dict[Any, int]]:
            tokens = {UsageContext.LLM_CLASS: 16384, UsageContext.OPENAI_API_SERVER: 8192}
            return tokens, {UsageContext.OPENAI_API_SERVER: 1024}

    return OnAnH100


def config_of(folder: Path, make: Any = None, *, on_cpu: bool = True, **given: Any) -> Any:
    facts = read_model(str(make_model(folder / "model")), trust_remote_code=False)
    settings = EngineSettings(model=facts, config=worker_config(engine_args=given), seed=0)
    return engine_config(make or own_args(), engine_args(settings, on_cpu=on_cpu))


def test_prompts_are_prefilled_in_steps_as_large_as_those_of_vllms_own_server(tmp_path: Path) -> None:
    on_an_h100 = args_on_an_h100()
    assert config_of(tmp_path, on_an_h100).scheduler_config.max_num_batched_tokens == 8192
    given = config_of(tmp_path, on_an_h100, max_num_batched_tokens=512)
    assert given.scheduler_config.max_num_batched_tokens == 512


def test_maps_among_the_arguments_reach_vllm(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        on_cpu=False,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    )
    assert "none" in config.compilation_config.custom_ops
    assert config.speculative_config.num_speculative_tokens == 2


def test_a_draft_model_is_read_from_its_folder_though_the_model_is_not(tmp_path: Path) -> None:
    draft = {"model": str(make_model(tmp_path / "draft")), "method": "draft_model", "num_speculative_tokens": 2}
    config = config_of(tmp_path, on_cpu=False, speculative_config=draft)
    assert config.load_config.load_format == "dummy"
    assert config.speculative_config.draft_load_config.load_format == "auto"
    asked = {**draft, "draft_load_config": {"load_format": "dummy"}}
    config = config_of(tmp_path, on_cpu=False, speculative_config=asked)
    assert config.speculative_config.draft_load_config.load_format == "dummy"


def test_speculation_is_refused_where_vllm_draws_wrong_tokens(tmp_path: Path) -> None:
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(ConfigError, match=r"speculative_config: vLLM's build for CPUs draws wrong tokens"):
        config_of(tmp_path, speculative_config=draft)
    assert config_of(tmp_path, speculative_config=None).speculative_config is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compilation_config": {"mod": 3}}, r"mod = 3: Unexpected keyword argument"),
        ({"compilation_config": [1]}, r"compilation_config"),
        ({"speculative_config": {"method": "ngram"}}, r"num_speculative_tokens"),
    ],
)
def test_what_vllm_refuses_is_told_in_one_line_with_the_key(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(tmp_path, on_cpu=False, **given)
    assert str(caught.value).startswith("vLLM refuses this model or worker.engine_args: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_available", [0, 10])
def test_a_cache_that_vllm_finds_too_small_is_told_with_the_setting_that_counts(num_available: int) -> None:
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    with pytest.raises(ValueError, match="gpu_memory_utilization") as caught:
        _check_enough_kv_cache_memory(num_available, lambda: 100, 50, lambda _: 5)
    assert "kv_cache_memory_bytes, which is 77: raise it" in cache_remedy(str(caught.value), 77)
    assert cache_remedy(str(caught.value), None) == cache_remedy("out of memory", 77) == ""


# Routes, which vLLM tells on GPUs alone: what it says of it before it starts


def config_for_routes(folder: Path, mode: str) -> Any:
    facts = read_model(str(folder), trust_remote_code=False)
    algorithm = Algorithm.model_validate({"routing_replay": mode})
    config = worker_config(engine="vllm").model_copy(update={"algorithm": algorithm})
    arguments = {**engine_args(EngineSettings(model=facts, config=config, seed=0), on_cpu=False), "enforce_eager": True}
    refuse_unknown(arguments, [field.name for field in fields(own_args())])
    return engine_config(own_args(), arguments)


def test_vllm_knows_what_it_is_asked_for_routes_with_and_says_what_they_are_like(tmp_path: Path) -> None:
    """Here it goes no further: its second model runner needs triton."""
    mixture = make_family(tmp_path / "mixture", "qwen3_moe", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="AuxOutput Connector requires Model Runner V2"):
        config_for_routes(mixture, "rollout")
    config = config_for_routes(mixture, "none")
    assert not config.aux_output_config.enabled
    assert shape_of_vllm(config.model_config) == RouteShape(num_layers=3, num_chosen=2, num_experts=4)


def test_vllm_tells_the_routes_of_all_tokens_but_the_last() -> None:
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
    from vllm.outputs import CompletionOutput

    rows = np.zeros((20, 3, 2), np.uint8)
    request = SimpleNamespace(request_id="one", num_tokens=12)
    told = AuxOutputSchedulerConnector().take_output(request, {"one": AuxRequestOutput(token_start=0, rows=rows)})
    routes = routes_of_vllm(told, RouteShape(num_layers=3, num_chosen=2, num_experts=4), num_tokens=12 - 1)
    assert len(routes) == 11
    assert "routed_experts" in CompletionOutput.__dataclass_fields__
