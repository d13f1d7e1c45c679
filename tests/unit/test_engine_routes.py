"""Engines tell by which experts they routed a sample; workers pass it on, with the prompt's once a group."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError, EngineError
from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.routes import Routes, RouteShape, is_missing
from streamrl.workers.engines.base import EngineSettings, Generated, KvCache, Load, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.routes import routes_of_vllm, shape_of_vllm
from streamrl.workers.engines.transformers_engine import TransformersEngine
from streamrl.workers.engines.vllm.arguments import engine_args
from streamrl.workers.sessions.trace import Trace
from tests.helpers import wait_until_async
from tests.tiny_families import make_family
from tests.tiny_models import make_model
from tests.unit.test_environments_trace import ids, say
from tests.worker_world import WorkerWorld

SHAPE = RouteShape(num_layers=3, num_chosen=2, num_experts=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its second layer has no experts."""
    changes = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    return make_family(tmp_path_factory.mktemp("model"), "qwen3_moe", **changes)


def settings(folder: Path, mode: str = "rollout", **worker: Any) -> EngineSettings:
    config = schema.Config(
        model=schema.Model(path=str(folder)),
        data=schema.Data(train="", max_prompt_tokens=16),
        sampling=schema.Sampling(max_tokens=60),
        algorithm=schema.Algorithm.model_validate({"routing_replay": mode}),
        worker=schema.Worker(**{"engine": "transformers", "threads": 1, **worker}),
        weights=schema.Weights(dtype="float32"),
    )
    return EngineSettings(model=read_model(str(folder), trust_remote_code=False), config=config, seed=1)


def versions(folder: Path) -> list[Any]:
    """Models, each with its weights as they are published."""
    made = []
    for number in (1, 2):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= number**0.2
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / f"{number}.safetensors")
        made.append(model)
    return made


def routes_of(model: Any, token_ids: list[int]) -> np.ndarray:
    """[T, layers, k] of one plain pass."""
    seen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _module, _args, out: seen.append(out[2])) for gate in gates]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[0], torch.zeros_like(seen[0]), seen[1]], dim=1).numpy()


@pytest.mark.parametrize("kv_cache", ["clear", "salt"])
async def test_a_sample_has_the_routes_of_the_passes_that_made_its_tokens(folder: Path, kv_cache: KvCache) -> None:
    models = versions(folder)
    engine = TransformersEngine(settings(folder))
    await engine.start()
    try:
        await engine.load(Load(weights=folder / "1.safetensors", version=1, step=0))
        prompts = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [20]]
        asked = [
            SampleRequest(
                request_id=str(at),
                prompt_ids=np.array(prompt, np.int32),
                sampling=schema.Sampling(max_tokens=60, min_tokens=60),
            )
            for at, prompt in enumerate(prompts)
        ]
        made = [asyncio.create_task(engine.generate(one)) for one in asked]

        async def some_are_made() -> bool:
            return engine.stats().num_made > 10

        await wait_until_async(some_are_made, description="some tokens were made")
        await engine.load(Load(weights=folder / "2.safetensors", version=2, step=1, kv_cache=kv_cache))
        await engine.logprobs(np.arange(3, 9, dtype=np.int32))  # a canary's passes are nobody's
        samples = await asyncio.gather(*made)
    finally:
        await engine.stop()
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.routes is not None
        assert sample.routes.shape == (len(prompt) + 59, 3, 2)
        assert sample.routes.dtype == np.uint8
        assert [span.version for span in sample.spans] == [1, 2], "the load came in between"
        for span, model in zip(sample.spans, models, strict=True):
            truth = routes_of(model, [*prompt, *sample.token_ids[:-1].tolist()])
            begin, end = (0 if span.start == 0 else len(prompt) + span.start - 1), len(prompt) + span.end - 1
            if span.version == 1 or kv_cache == "clear":  # else keys are of both
                assert sample.routes[begin:end].tolist() == truth[begin:end].tolist()


async def test_nothing_is_told_where_nobody_asks(folder: Path) -> None:
    versions(folder)
    engine = TransformersEngine(settings(folder, "first_pass"))
    await engine.start()
    await engine.load(Load(weights=folder / "1.safetensors", version=1, step=0))
    asked = SampleRequest(request_id="1", prompt_ids=ids([3, 4]), sampling=schema.Sampling(max_tokens=3))
    assert (await engine.generate(asked)).routes is None
    await engine.stop()


async def test_a_model_without_experts_ends_the_start_with_the_setting_and_the_remedy(tmp_path: Path) -> None:
    engine = TransformersEngine(settings(make_model(tmp_path / "model")))
    with pytest.raises(DataError, match=r"algorithm\.routing_replay = rollout: .* has no experts: set it to none"):
        await engine.start()
    await engine.stop()


# vLLM: what tells routes there needs a GPU, and never ran.


@pytest.mark.parametrize(
    ("arguments", "on_cpu", "words"),
    [
        ({}, True, r"rollout: vLLM reports routes on GPUs only, .* set worker\.engine=transformers, or this to none"),
        ({"pipeline_parallel_size": 2}, False, r"worker\.engine_args\.pipeline_parallel_size = 2: no vLLM process"),
        ({"decode_context_parallel_size": 4}, False, r"worker\.engine_args\.decode_context_parallel_size = 4"),
        ({"prefill_context_parallel_size": 2}, False, r"worker\.engine_args\.prefill_context_parallel_size = 2"),
        ({"enable_prefix_caching": False}, False, r"worker\.engine_args\.enable_prefix_caching = False: .* turns off"),
    ],
)
def test_a_vllm_that_could_not_tell_routes_is_refused(
    folder: Path, arguments: dict[str, Any], on_cpu: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_args(settings(folder, engine="vllm", engine_args=arguments), on_cpu=on_cpu)


def test_vllm_is_asked_for_routes_where_the_run_wants_them(folder: Path) -> None:
    asked = engine_args(settings(folder, engine="vllm", engine_args={"tensor_parallel_size": 2}), on_cpu=False)
    assert asked["enable_return_routed_experts"] is True
    for mode in ("none", "first_pass"):
        assert "enable_return_routed_experts" not in engine_args(settings(folder, mode, engine="vllm"), on_cpu=True)


def test_what_vllm_tells_is_brought_to_the_wires_form() -> None:
    told = {"get_total_num_hidden_layers": 3, "get_num_experts_per_tok": 2, "get_num_experts": 256}
    shape = shape_of_vllm(SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()}))
    rows = np.full((5, 3, 2), 255, np.uint8)  # vLLM's ids are a byte up to 256 experts
    found = routes_of_vllm(rows, shape, num_tokens=5)
    assert found.dtype == np.uint16
    assert not is_missing(found).any()
    for wrong in (None, rows[:4], rows[:, :2]):
        with pytest.raises(EngineError, match=r"vLLM returned routes .* for 5 tokens"):
            routes_of_vllm(wrong, shape, num_tokens=5)


# Rollouts of several turns


def turn(number: int, context: list[int], tokens: list[int]) -> Generated:
    """Its routes say which turn told them, and of which token of its context and answer."""
    generated = say(tokens)
    routes = np.zeros((len(context) + len(tokens) - 1, 1, 2), np.uint8)
    routes[:, 0, 0], routes[:, 0, 1] = number, np.arange(len(routes))
    return Generated(
        token_ids=generated.token_ids,
        logprobs=generated.logprobs,
        text="",
        finish_reason="stop",
        spans=generated.spans,
        routes=routes,
    )


def told(routes: Routes | None) -> list[tuple[int, int] | None]:
    assert routes is not None
    return [
        None if missing else tuple(row[0].tolist()) for row, missing in zip(routes, is_missing(routes), strict=True)
    ]


def test_what_ends_a_turn_gets_its_route_from_the_next_that_goes_on_behind_it() -> None:
    prompt = [3, 4, 5]
    trace = Trace(ids(prompt))
    for number, (context, tokens) in enumerate(
        [
            (prompt, [6, 7]),  # row 0
            ([*prompt, 6, 7, 8, 9], [10, 11, 12]),  # goes on, having been given 8 and 9
            ([*prompt, 6, 7, 20], [21]),  # a branch that leaves behind the first turn, whose end has its route
            ([*prompt, 6, 7, 8, 9, 10, 11, 12, 30], [31, 32]),  # goes on in row 0
            ([*prompt, 6, 7, 20, 21, 22], [23]),  # goes on in row 1
        ]
    ):
        trace.take(ids(context), turn(number, context, tokens))
    played = trace.played("stop", 0.0)
    assert played.sample.branches == (Branch(start=10, row=0, keep=5),)
    assert told(played.prompt_routes) == [(0, 0), (0, 1), (0, 2)]
    assert played.sample.token_ids.tolist() == [6, 7, 8, 9, 10, 11, 12, 30, 31, 32, 20, 21, 22, 23]
    assert told(played.sample.routes) == [
        *[(0, 3), (1, 4)],  # the answer, and its end as the second turn read it
        *[(1, 5), (1, 6), (1, 7), (1, 8), (3, 9)],
        *[(3, 10), (3, 11), None],
        *[(2, 5), (4, 6), (4, 7), None],
    ]


def test_a_branch_that_leaves_behind_an_unread_end_leaves_it_without_a_route() -> None:
    trace = Trace(ids([3]))
    trace.take(ids([3]), turn(0, [3], [6, 7]))
    trace.take(ids([3, 6, 7]), turn(1, [3, 6, 7], [8]))  # asked at once: a branch, so that it is known where it began
    sample = trace.played("stop", 0.0).sample
    assert sample.branches == (Branch(start=2, row=0, keep=3),)
    assert told(sample.routes) == [(0, 1), None, None]


def test_a_rollout_that_never_asked_with_its_prompt_has_no_routes_of_it() -> None:
    trace = Trace(ids([3, 4]))
    trace.take(ids([9]), turn(0, [9], [6, 7]))
    played = trace.played("stop", 0.0)
    assert played.prompt_routes is None
    assert told(played.sample.routes) == [(0, 0), (0, 1), None]


# What workers deliver


class RoutedDouble(EngineDouble):
    """Its routes say whose prompt they are of; every second sample is empty."""

    async def generate(self, request: SampleRequest) -> Generated:
        number = len(self.requests) + 1
        made = await super().generate(request)
        if number % 2 == 0:
            return replace(made, token_ids=made.token_ids[:0], logprobs=made.logprobs[:0], spans=())
        num_tokens = len(request.prompt_ids) + len(made.token_ids) - 1
        return replace(made, routes=np.full((num_tokens, 1, 2), number, np.uint8))


async def test_a_group_has_its_prompts_routes_once_and_an_evaluation_none() -> None:
    world = WorkerWorld(engine=RoutedDouble())
    world.put(1, num_samples=4)
    world.start()
    [group] = await world.delivered(1)
    assert told(group.prompt_routes) == [(1, 1)] * 3
    assert [told(sample.routes) for sample in group.samples] == [
        [(n, n)] * 3 + [None] if n else [] for n in (1, 0, 3, 0)
    ]
    world.put(2, num_samples=2, purpose="eval")
    *_, evaluated = await world.delivered(2)
    assert evaluated.header.routes is None
    assert evaluated.prompt_routes is None
    await world.finish()
