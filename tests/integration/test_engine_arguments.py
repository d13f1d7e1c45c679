"""What vLLM makes of the arguments of an engine, asked of vLLM itself; no engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from streamrl.errors import ConfigError
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm_start import engine_args, engine_config
from tests.tiny_models import make_model
from tests.worker_world import worker_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

H100 = {UsageContext.LLM_CLASS: 16384, UsageContext.OPENAI_API_SERVER: 8192}


class OnAnH100(AsyncEngineArgs):
    """As far as vLLM's defaults go, which it takes from the name and the memory of the GPU."""

    @classmethod
    def get_batch_defaults(cls, world_size: int) -> tuple[dict[Any, int], dict[Any, int]]:
        return dict(H100), {UsageContext.OPENAI_API_SERVER: 1024}


def config_of(folder: Path, make: Any = AsyncEngineArgs, **given: Any) -> Any:
    facts = read_model(str(make_model(folder / "model")), trust_remote_code=False)
    settings = EngineSettings(model=facts, config=worker_config(engine_args=given), seed=0)
    return engine_config(make, engine_args(settings, on_cpu=True))


def test_prompts_are_prefilled_in_steps_as_large_as_those_of_vllms_own_server(tmp_path: Path) -> None:
    assert config_of(tmp_path, OnAnH100).scheduler_config.max_num_batched_tokens == 8192
    given = config_of(tmp_path, OnAnH100, max_num_batched_tokens=512)
    assert given.scheduler_config.max_num_batched_tokens == 512


def test_maps_among_the_arguments_reach_vllm(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    )
    assert "none" in config.compilation_config.custom_ops
    assert config.speculative_config.num_speculative_tokens == 2


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
        config_of(tmp_path, **given)
    assert str(caught.value).startswith("vLLM refuses this model or worker.engine_args: ")
    assert "\n" not in str(caught.value)
