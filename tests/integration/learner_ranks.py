"""What each rank does in test_learner_ranks: steps on its share of groups, versions, a checkpoint; and the gradients of
every algorithm. Run by `tests.warm`.

python -m tests.integration.learner_ranks FOLDER REPLICAS JOB...    FOLDER/model exists; results: FOLDER/out-<size>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from streamrl.config import schema
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.shard import load_state
from streamrl.learner.loading.load import load_policy, load_reference
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.lora import adapter_parameters, merged_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import FrozenLogprobs, frozen_logprobs, make_reference
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.packing.pack import pack
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble
from streamrl.learner.process.ranks import World, join_world
from streamrl.learner.publishing.publish import Publisher
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.file_store import FileStore
from streamrl.recipe.algorithms import make_algorithm
from streamrl.recipe.losses import LOSSES
from tests.casts import watch_a_pass
from tests.learner_cases import learner_config, random_groups
from tests.leaving import leave
from tests.probing import probe
from tests.publish_world import finish, publish
from tests.shards import write_shard

NUM_STEPS = 3
NUM_DOUBLE_STEPS = 51
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"loss": name} for name in LOSSES},
    "token mean": {"loss_mean": "token"},
    "normalized, scaled, discounted": {"normalize_batch": True, "scale_by_std": True, "discount_factor": 0.9},
    "kl in the loss": {"kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3)},
    "a loss of one's own": {"loss": "tests.own_loss:with_bonus", "loss_args": {"bonus": 0.3}},
    "rejection sampling": {"name": "rejection_sampling"},
}
END = 1  # of the tiny tokenizer
ADAPTERS = schema.Lora(rank=3, targets=("q_proj", "v_proj", "down_proj"))  # three rows are no even shards


def out_of(folder: Path, world: World) -> Path:
    return folder / out_name(world.size, world.layout.replicas)


def out_name(size: int, replicas: int = 1) -> str:
    return f"out-{size}" if replicas == 1 else f"out-{size}x{replicas}"


class KeptAnnouncements:
    """Rank 0's half of the stream, as far as publishing goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def announce(self, announcement: Announcement, *, keep: list[int]) -> None:
        (self._folder / f"manifest-{announcement.version}").write_bytes(announcement.manifest)

    amend = announce


def never_round(policy: Policy) -> None:
    """The model's own norms would be computed in fp32."""
    for module in policy.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(_norm, module)


def _norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


class Rank:
    """One rank with its model, from the base model or from a checkpoint folder."""

    def __init__(self, folder: Path, world: World, *, lora: schema.Lora | None = None, dtype: str = "float32") -> None:
        self.config = learner_config(
            folder / "model",
            dir=out_of(folder, world),
            model=schema.Model(path=str(folder / "model"), dtype=dtype, lora=lora),
            # Little groups and a small bound: several micro-batches, not equally many on each rank.
            training=schema.Training(micro_batch_tokens=40),
        )
        self.world = world
        torch.manual_seed(self.config.seed)
        self.policy = load_policy(self.config, world, (END,))
        if dtype == "float64":
            never_round(self.policy)
        self.optimizer = make_optimizer(self.policy, self.config.optimizer)
        self.reference = make_reference(self.config, world, (END,), self.policy)
        self.gradients = self.make_gradients(self.config)

    def make_gradients(self, config: schema.Config) -> Gradients:
        return Gradients(
            policy=self.policy,
            reference=self.reference,
            algorithm=make_algorithm(config.algorithm),
            config=config,
            world=self.world,
            beat=lambda: None,
        )

    def reference_logprobs(self, reference: FrozenLogprobs | None = None) -> torch.Tensor:
        ids = np.arange(3, 30, dtype=np.int32)
        [batch] = pack([probe(ids)], max_tokens=len(ids), shape=self.policy.shape)
        return (reference or self.reference)(batch)

    def gradient(self, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Of an algorithm, over all ranks."""
        config = self.config.model_copy(update={"algorithm": schema.Algorithm(**settings)})
        groups = random_groups(5, seed=11)[self.world.rank :: self.world.size]
        tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
        gradients = self.make_gradients(config)
        gradients.accumulate(gradients.prepare(groups, tally), tally)
        found = {name: whole(p.grad).clone() for name, p in self.policy.named_parameters()}
        self.optimizer.zero_grad()
        return found

    def step(self, number: int, *, num_groups: int = 5) -> dict[str, float]:
        groups = random_groups(num_groups, seed=number)[self.world.rank :: self.world.size]
        tally = Tally(sources=tuple(self.config.rewards), step=number, is_dead=lambda _version, _step: False)
        batch = self.gradients.prepare(groups, tally)
        loss = self.gradients.accumulate(batch, tally)
        made = update(self.optimizer, loss=loss, lr=1e-3, clip_norm=1.0, world=self.world)
        return {**tally.metrics(self.world), "loss": made.loss, "grad_norm": made.grad_norm}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in self.policy.model.named_parameters()}

    def merged(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in merged_parameters(self.policy.model, torch.float32)}


def publisher(rank: Rank, folder: Path, background: BackgroundThread) -> Publisher:
    return Publisher(
        policy=rank.policy,
        config=rank.config,
        world=rank.world,
        run_uid="run",
        term=1,
        store=FileStore(folder / "blobs"),
        announcer=KeptAnnouncements(folder),
        canary_ids=(3, 9, 4),
        background=background,
        sweeping=BackgroundThreadDouble(),
    )


def save_gradients(folder: Path, world: World) -> None:
    out = out_of(folder, world)
    out.mkdir(exist_ok=True)
    rank = Rank(folder, world)
    found = {f"{a}/{name}": g for a, of in ALGORITHMS.items() for name, g in rank.gradient(of).items()}
    keep(found, out / "gradients.safetensors", world)


def poison_one_rank(rank: Rank, versions: Publisher) -> dict[str, bool]:
    """A gradient that is not a number, on the last rank alone, and a version published after it."""
    before = rank.weights()
    moments = [moment.clone() for state in rank.optimizer.state.values() for moment in state.values()]
    tally = Tally(sources=tuple(rank.config.rewards), step=0, is_dead=lambda _version, _step: False)
    groups = random_groups(5, seed=7)[rank.world.rank :: rank.world.size]
    loss = rank.gradients.accumulate(rank.gradients.prepare(groups, tally), tally)
    if rank.world.rank == rank.world.size - 1:
        gradient = next(p.grad for p in rank.policy.parameters() if p.grad is not None)
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = torch.nan
    made = update(rank.optimizer, loss=loss, lr=1e-3, clip_norm=1.0, world=rank.world)
    after = [moment for state in rank.optimizer.state.values() for moment in state.values()]
    assert publish(versions, NUM_STEPS) is not None
    return {
        "skipped": not made.applied,
        "weights stayed": all(torch.equal(w, before[name]) for name, w in rank.weights().items()),
        "moments stayed": all(torch.equal(*both) for both in zip(after, moments, strict=True)),
        "gradients are gone": all(p.grad is None for p in rank.policy.parameters()),
    }


def work(folder: Path, world: World) -> None:
    out = out_of(folder, world)
    out.mkdir(exist_ok=True)
    rank = Rank(folder, world)
    keep(rank.weights(), out / "begin.safetensors", world)
    reference = rank.reference_logprobs()
    metrics: dict[str, float] = {}
    background = BackgroundThread("publisher")
    with background.working(join_s=60):
        versions = publisher(rank, out, background)
        for number in range(NUM_STEPS):
            versions.begin(number)
            # The last batch has one group: with two ranks, one of them gets nothing.
            metrics = rank.step(number, num_groups=1 if number == NUM_STEPS - 1 else 5)
            assert finish(versions) is not None
        assert publish(versions, NUM_STEPS) is not None
        found = poison_one_rank(rank, publisher(rank, out / "poisoned", background))
    assert torch.equal(rank.reference_logprobs(), reference), "steps do not move the reference"
    (out / f"poisoned-{world.rank}.json").write_text(json.dumps(found))
    (out / "checkpoint").mkdir(exist_ok=True)
    world.barrier()
    write_shard(out / "checkpoint", rank.policy, rank.optimizer, world)
    world.barrier()
    restored = Rank(folder, world)
    load_state(out / "checkpoint", restored.policy, restored.optimizer, world)
    after, restored_after = (r.step(NUM_STEPS)["loss"] for r in (rank, restored))
    assert after == restored_after, f"a restored rank goes on differently: {after} and {restored_after}"
    if world.size > 1:
        on_host = frozen_logprobs(load_reference(rank.config, world, (END,), on_host=True))
        assert torch.equal(rank.reference_logprobs(on_host), reference), "it says the same wherever it waits"
        grown = Rank(folder, world)  # goes on from what one rank wrote
        load_state(folder / "out-1" / "checkpoint", grown.policy, grown.optimizer, world)
        grown.step(NUM_STEPS)
        keep(grown.weights(), out / "grown.safetensors", world)
    keep(rank.weights(), out / "weights.safetensors", world, {k: repr(v) for k, v in metrics.items()})


def train_adapters(folder: Path, world: World) -> None:
    """Steps, versions, a checkpoint, a resume and the export of a model whose base stays as it is."""
    out = out_of(folder, world) / "adapters"
    out.mkdir(parents=True, exist_ok=True)
    rank = Rank(folder, world, lora=ADAPTERS)
    keep(adapters_of(rank), out / "begin.safetensors", world)
    before = rank.reference_logprobs()
    background = BackgroundThread("publisher")
    with background.working(join_s=60):
        versions = publisher(rank, out, background)
        for number in range(NUM_STEPS):
            rank.step(number)
            assert publish(versions, number + 1) is not None
    assert torch.equal(rank.reference_logprobs(), before), "the base is the reference, and never moves"
    (out / "checkpoint").mkdir(exist_ok=True)
    world.barrier()
    write_shard(out / "checkpoint", rank.policy, rank.optimizer, world)
    world.barrier()
    export(rank.policy, read_tokenizer_info(rank.config.model.path).tokenizer, rank.config, world)
    keep(rank.merged(), out / "merged.safetensors", world)
    for name, written_by in (("resumed", world.size), ("changed", 1)):
        resumed = Rank(folder, world, lora=ADAPTERS)
        written = folder / f"out-{written_by}" / "adapters" / "checkpoint"
        load_state(written, resumed.policy, resumed.optimizer, world)
        assert torch.equal(resumed.reference_logprobs(), before), "not by a resume either"
        resumed.step(NUM_STEPS)
        keep(resumed.merged(), out / f"{name}.safetensors", world)
    rank.step(NUM_STEPS)
    keep(rank.merged(), out / "after.safetensors", world)


def adapters_of(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: whole(parameter).clone() for name, parameter in adapter_parameters(rank.policy.model)}


def keep(tensors: Mapping[str, torch.Tensor], path: Path, world: World, metadata: dict[str, str] | None = None) -> None:
    if world.is_main:
        safetensors.torch.save_file(dict(tensors), path, metadata)


def train_in_float64(folder: Path, world: World) -> None:
    """One rank: all steps, and the state after the first third. More: the second third, from where that one stopped."""
    rank = Rank(folder, world, dtype="float64")
    first, second = NUM_DOUBLE_STEPS // 3, 2 * NUM_DOUBLE_STEPS // 3
    if world.size == 1:
        make_double_steps(rank, 0, first)
        save_double(rank, folder)
        make_double_steps(rank, first, NUM_DOUBLE_STEPS)
        keep(rank.weights(), folder / "double.safetensors", world)
    else:
        load_state(folder / "double-1", rank.policy, rank.optimizer, world)
        make_double_steps(rank, first, second)
        save_double(rank, folder)


def make_double_steps(rank: Rank, begin: int, end: int) -> None:
    for number in range(begin, end):
        rank.step(number)


def save_double(rank: Rank, folder: Path) -> None:
    out = folder / f"double-{rank.world.size}"
    out.mkdir(exist_ok=True)
    rank.world.barrier()
    write_shard(out, rank.policy, rank.optimizer, rank.world)


def compute_in_half(folder: Path, world: World) -> None:
    """A gradient, a step, and what of the layers' weights there is in bf16 meanwhile."""
    out = out_of(folder, world)
    out.mkdir(exist_ok=True)
    rank = Rank(folder, world, dtype="bfloat16")
    keep(rank.gradient(ALGORITHMS["token mean"]), out / "half.safetensors", world)
    rank.step(0)
    (out / f"half-{world.rank}.json").write_text(json.dumps(watch_a_pass(rank.policy)))


JOBS: Mapping[str, Callable[[Path, World], None]] = {
    "gradients": save_gradients,
    "work": work,
    "adapters": train_adapters,
    "float64": train_in_float64,
    "bfloat16": compute_in_half,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_world(os.environ, timeout_s=240) as joined:
        world = joined.under(schema.Layout(replicas=int(sys.argv[2])))
        for job in sys.argv[3:]:
            JOBS[job](Path(sys.argv[1]), world)
            world.barrier()  # a rank that leaves closes connections from which others may still read
    leave()
