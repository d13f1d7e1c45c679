"""Routing replay on tiny mixtures of experts in bf16: the difference between engine and learner, without it and with.

The transformers engine samples token by token with a KV cache of left-padded rows; the learner computes the same tokens
in packed rows under a mask, with grouped matmuls over all experts. Kernels add in different orders, so the last bits
differ, and a router whose best experts are nearly equal chooses others; the weights are the same. The comparison uses
the routes actually taken: a hook on the learner's routers records what its experts receive.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from bench.measure import Say
from bench.report import Bar, Fact, Line
from bench.worker_model import VOCABULARY, make_tokenizer
from streamrl.config import schema
from streamrl.config.routers import find_routers
from streamrl.learner.loading.load import load_policy
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.packing.micro_batches import MicroBatch, Piece
from streamrl.learner.packing.pack import pack
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.routes import ending, joined, pack_routes
from streamrl.workers.engines.base import EngineSettings, Generated, Load, SampleRequest
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.transformers_engine import TransformersEngine

_MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform routing
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_MICRO_BATCH_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Differences between the learner and the engine on the engine's samples."""

    difference: float  # mean over tokens of |log mu - log pi|
    num_pairs: int  # pairs of a token and a layer
    num_differing: int  # pairs with different sets of experts


def bench(*, quick: bool, say: Say) -> list[Line]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    seeds, num_samples = (1, 24) if quick else (4, 48)
    without, replayed, bits = [], [], []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder) / "model", seed=seed)
            pieces = _sampled(model, num_samples=num_samples, seed=seed)
            without.append(_measure(_config(model, "compare"), pieces))
            replayed.append(_measure(_config(model, "rollout"), pieces))
            bits.append(_bits_an_id(pieces))
        differences = f"{without[-1].difference:.4f} without, {replayed[-1].difference:.4f} with"
        say(f"model {seed}: |log-prob difference| {differences}")
    alone, with_it = _mean(without), _mean(replayed)
    return [
        Bar(name="routes that differ without replay", value=_share(without), unit="", goal=0.001, better="higher"),
        Bar(name="routes that differ with it", value=_share(replayed), unit="", goal=0.0, better="lower"),
        Bar(name="|log-prob difference| with / without", value=with_it / alone, unit="x", goal=0.5, better="lower"),
        Fact(name="|log-prob difference| without", value=alone, unit="nats"),
        Fact(name="|log-prob difference| with", value=with_it, unit="nats"),
        Fact(name="pairs of a token and a layer", value=sum(one.num_pairs for one in without), unit=""),
        Fact(name="an expert of 32 on the wire", value=float(np.mean(bits)), unit="bits"),
    ]


def write_model(folder: Path, *, seed: int) -> Path:
    """Write a mixture of experts with random weights, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**_MODEL))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _mean(found: Sequence[Apart]) -> float:
    return float(np.mean([one.difference for one in found]))


def _share(found: Sequence[Apart]) -> float:
    return sum(one.num_differing for one in found) / sum(one.num_pairs for one in found)


def _config(model: Path, mode: str) -> schema.Config:
    return schema.Config(
        model=schema.Model(path=str(model), dtype="bfloat16"),
        data=schema.Data(train="", max_prompt_tokens=32),
        sampling=schema.Sampling(max_tokens=48, min_tokens=48),
        algorithm=schema.Algorithm.model_validate({"routing_replay": mode}),
        worker=schema.Worker(engine="transformers", threads=1),
    )


def _sampled(folder: Path, *, num_samples: int, seed: int) -> list[Piece]:
    """Return prompts and answers as the learner receives them."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 40, rng.integers(2, 24), dtype=np.int32) for _ in range(num_samples)]
    samples = asyncio.run(_generate(folder, prompts))
    return [
        Piece(
            sample=at,
            group=at,
            prompt_ids=prompt,
            token_ids=sample.token_ids,
            behaviour_logprobs=sample.logprobs,
            mask=np.ones(len(sample.token_ids), dtype=np.bool_),
            routes=_routes(prompt, sample),
        )
        for at, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
    ]


def _routes(prompt: Any, sample: Generated) -> Any:
    assert sample.routes is not None
    return joined(sample.routes[: len(prompt)], ending(sample.routes[len(prompt) :]))


async def _generate(folder: Path, prompts: Sequence[Any]) -> list[Generated]:
    config = _config(folder, "rollout")
    weights = folder / "published.safetensors"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    save_file({name: parameter.detach().clone() for name, parameter in model.named_parameters()}, weights)
    engine = TransformersEngine(
        EngineSettings(model=read_model(str(folder), trust_remote_code=False), config=config, seed=1)
    )
    await engine.start()
    try:
        await engine.load(Load(weights=weights, version=1, step=0))
        requests = [
            SampleRequest(request_id=str(at), prompt_ids=prompt, sampling=config.sampling)
            for at, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.generate(one) for one in requests))
    finally:
        await engine.stop()


@torch.no_grad()
def _measure(config: schema.Config, pieces: Sequence[Piece]) -> Apart:
    policy = load_policy(config, World(rank=0, size=1, device=torch.device("cpu")), (1,))
    policy.replay = RoutingReplay(policy.model, config)
    used: dict[int, torch.Tensor] = {}  # by layer, [cells, k]: what its experts received
    for layer, router in find_routers(policy.model, config).by_layer.items():
        router.register_forward_hook(lambda _module, _args, out, layer=layer: used.update({layer: out[2]}))
    total, num_tokens, num_pairs, num_differing = 0.0, 0, 0, 0
    for batch in pack(pieces, max_tokens=_MICRO_BATCH_TOKENS, shape=policy.shape):
        logp = policy(batch).logp
        total += float((batch.behaviour_logprobs - logp).abs().sum())
        num_tokens += len(logp)
        pairs, differing = _compared(batch, used)
        num_pairs, num_differing = num_pairs + pairs, num_differing + differing
    return Apart(difference=total / num_tokens, num_pairs=num_pairs, num_differing=num_differing)


def _compared(batch: MicroBatch, used: dict[int, torch.Tensor]) -> tuple[int, int]:
    """Return (pairs of a token and a layer, how many of them the learner routed differently from the engine)."""
    assert batch.routes is not None
    routes = batch.routes.flatten(0, 1)
    pairs = differing = 0
    for layer, chosen in used.items():
        of_layer = routes[:, layer].long()
        known = of_layer[:, 0] >= 0
        other = (of_layer.sort(-1).values != chosen.sort(-1).values).any(-1)
        pairs, differing = pairs + int(known.sum()), differing + int((other & known).sum())
    return pairs, differing


def _bits_an_id(pieces: Sequence[Piece]) -> float:
    whole = np.concatenate([piece.routes for piece in pieces if piece.routes is not None])
    counts, _ = pack_routes(whole[:0], [whole], 0, [len(whole)])
    assert counts is not None
    return 8 * counts.num_bytes / whole.size
