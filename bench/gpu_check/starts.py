"""Learners with their weights in each possible place: load, trial, two steps, checkpoint, restore, another step.

    device      masters and moments on the GPU
    host        masters, gradients and moments in host memory (`model.masters: cpu`); AdamW runs there
    adapters    LoRA: the frozen base is on the host during the trial

Then a reference in host memory (`model.reference: cpu`) is compared with one on the GPU. The model is random, and is
written to files first so that it is loaded the way a user's model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.rows import Row, Scale
from bench.learner_gpu import SIZES
from bench.long_tailed import END, Lengths, Size, make_config, make_groups
from bench.measure import seconds
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.learner.checkpoints.shard import Shard, load_state
from streamrl.learner.loading.load import load_policy, load_reference
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import frozen_logprobs
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.parallel.dtensors import held
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm

_TINY = Size(vocabulary=97, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)
_LENGTHS = Lengths(prompt=(16, 64), median=200, spread=0.9, longest=1024)
_SHORT = Lengths(prompt=(3, 6), median=6, spread=0.9, longest=40)
_LORA = schema.Lora(rank=16, alpha=32.0, targets=("q_proj", "down_proj"))
PLACES: Mapping[str, Mapping[str, Any]] = {"device": {}, "host": {"masters": "cpu"}, "adapters": {"lora": _LORA}}


def check(scale: Scale) -> Iterator[Row]:
    size, lengths = (_TINY, _SHORT) if scale.is_reduced else (SIZES["0.5B"], _LENGTHS)
    groups = make_groups(2 if scale.is_reduced else 8, num_samples=4, lengths=lengths, vocabulary=size.vocabulary)
    with scratch_folder() as folder:
        size.model(max_length=2048, device=torch.device("cpu")).save_pretrained(folder / "model")
        for name, place in PLACES.items():
            yield from _of(name, _Learner(_config(folder / "model", scale, place), scale), folder / name, groups)
        yield from _of_reference(_config(folder / "model", scale, {}), scale, groups)


def _config(model: Path, scale: Scale, place: Mapping[str, Any]) -> schema.Config:
    config = make_config(micro_batch_tokens=64 if scale.is_reduced else 2048, dtype="bfloat16")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model), **place})})


class _Learner:
    def __init__(self, config: schema.Config, scale: Scale) -> None:
        self.config, self.world = config, World(rank=0, size=1, device=scale.device)
        self.policy = load_policy(config, self.world, (END,))
        self.optimizer = make_optimizer(self.policy, config.optimizer)
        self.gradients = Gradients(
            policy=self.policy,
            reference=None,
            algorithm=make_algorithm(config.algorithm),
            config=config,
            world=self.world,
            beat=lambda: None,
        )

    def step(self, groups: list[Group]) -> bool:
        tally = Tally(sources=tuple(self.config.rewards), step=0, is_dead=lambda _version, _step: False)
        loss = self.gradients.accumulate(self.gradients.prepare(groups, tally), tally)
        return update(self.optimizer, loss=loss, lr=1e-4, clip_norm=1.0, world=self.world).applied

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return a checkpoint's content for this learner, on the host."""
        found = {}
        for name, parameter in self.policy.named_parameters():
            for kind, tensor in {"master": parameter, **self.optimizer.state.get(parameter, {})}.items():
                if kind != "step" and parameter.requires_grad:
                    found[f"{kind}/{name}"] = held(tensor, shape=parameter.shape).values.cpu()
        return found


def _of(name: str, learner: _Learner, folder: Path, groups: list[Group]) -> Iterator[Row]:
    """Run two steps and a checkpoint; from the second step on, the optimizer has moments."""
    applied = [learner.step(groups) for _ in range(2)]
    yield Row(what=f"{name}: steps made", value=sum(applied), unit="", goal=2, note=f"asked {learner.policy.way}")
    shard = Shard(learner.policy, learner.optimizer, learner.world)
    shard.take()
    took_s = seconds(shard.take)
    folder.mkdir()
    shard.write(folder)
    num_bytes = sum(tensor.nbytes for tensor in learner.state().values())
    yield Row(what=f"{name}: checkpoint copied", value=num_bytes / took_s / 1e9, unit="GB/s", note="the loop waits")
    other = _Learner(learner.config, Scale(device=learner.world.device))
    load_state(folder, other.policy, other.optimizer, other.world)
    ours, theirs = learner.state(), other.state()
    off = sum(key not in theirs or not torch.equal(ours[key], theirs[key]) for key in ours)
    yield Row(what=f"{name}: not restored", value=off, unit="", goal=0, better="lower", note=f"of {len(ours)}")
    yield Row(what=f"{name}: steps after it", value=other.step(groups), unit="", goal=1)


def _of_reference(config: schema.Config, scale: Scale, groups: list[Group]) -> Iterator[Row]:
    learner = _Learner(config, scale)
    tally = Tally(sources=(), step=0, is_dead=lambda _version, _step: False)
    [first, *_] = learner.gradients.prepare(groups, tally).micro_batches

    def logprobs(*, on_host: bool) -> torch.Tensor:
        like: Policy = learner.policy
        return frozen_logprobs(load_reference(config, learner.world, (END,), like=like, on_host=on_host))(first)

    off = float((logprobs(on_host=True) - logprobs(on_host=False)).abs().max())
    yield Row(what="reference on the host: largest difference", value=off, unit="nats", goal=0, better="lower")
