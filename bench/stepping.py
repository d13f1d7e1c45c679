"""A learner's step without its stream, and the minimum any learner has to do with the same packed tokens.

Stepping.learn    prepare, gradients, guard, clip, AdamW: all that the loop does between fetching and publishing
Stepping.bare     forward and backward of the plain model on the same rows, with its own cross-entropy
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
import transformers

from bench.long_tailed import END, Size
from streamrl.config import schema
from streamrl.learner.loading.load import make_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.compiled import compile_layers, compiles, with_layers
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import Update, make_optimizer, update
from streamrl.learner.packing.attention import choose
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.planning.recomputing import recomputes
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm


class Stepping:
    def __init__(self, size: Size, config: schema.Config, *, max_length: int, device: torch.device) -> None:
        self._world = World(rank=0, size=1, device=device)
        self._config = config
        self._plain: transformers.PreTrainedModel | None = None  # created at the first bare pass
        self._make_model = partial(
            size.model, max_length=max_length, device=device, attention=choose(config.model, device)
        )
        model = self._make_model()
        self.layers = self._decided(model)
        policy = make_policy(self._prepared(model), config, (END,), self._world)
        self.policy = shard(policy, self._world, in_half=config.model.dtype == "bfloat16")
        self._compile(self.policy.model)
        self._optimizer = make_optimizer(self.policy, config.optimizer)
        self._gradients = Gradients(
            policy=self.policy,
            reference=None,
            algorithm=make_algorithm(config.algorithm),
            config=config,
            world=self._world,
            beat=lambda: None,
        )

    def _decided(self, model: transformers.PreTrainedModel) -> schema.Model:
        """The model's settings, with what `auto` leaves open decided as a learner does."""
        config = with_layers(self._config, compiled=compiles(self._config, model, self._world))
        again = recomputes(config, Sizes.of(model), self._world)
        return config.model.model_copy(update={"gradient_checkpointing": again})

    def _prepared(self, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
        if self.layers.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def _compile(self, model: transformers.PreTrainedModel) -> None:
        if self.layers.compile:
            compile_layers(model, or_go_on=False)

    def learn(self, groups: Sequence[Group]) -> Update:
        tally = self._tally()
        loss = self._gradients.accumulate(self._gradients.prepare(groups, tally), tally)
        made = update(self._optimizer, loss=loss, lr=1e-6, clip_norm=1.0, world=self._world)
        tally.metrics(self._world)
        self.wait()
        return made

    def pack(self, groups: Sequence[Group]) -> Sequence[MicroBatch]:
        return self._gradients.prepare(groups, self._tally()).micro_batches

    def num_tokens(self, groups: Sequence[Group]) -> int:
        """Count tokens as packed."""
        return self._gradients.prepare(groups, self._tally()).num_tokens

    def flops(self, groups: Sequence[Group]) -> float:
        return self._gradients.prepare(groups, self._tally()).flops

    def bare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run passes of a separate, unsharded model. In bf16, autocast casts its weights, as in the learner."""
        dtype = getattr(torch, self._config.model.dtype)
        shape = self.policy.shape
        if self._plain is None:
            self._plain = self._prepared(self._make_model())
            self._compile(self._plain)
        model = self._plain
        for batch in micro_batches:
            starts = {"cu_seq_lens_q": batch.starts, "max_length_q": batch.longest, "prefixes": batch.prefixes}
            where = {} if shape.padded else starts
            with torch.autocast(self._world.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                logits = model(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    attention_mask=batch.attention_mask() if shape.share_prompts and shape.padded else None,
                    use_cache=False,
                    **where,
                ).logits
            targets = batch.input_ids.flatten().roll(-1)
            F.cross_entropy(logits.flatten(0, 1).float(), targets).backward()
        model.zero_grad(set_to_none=True)
        self.wait()

    def wait(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _tally(self) -> Tally:
        return Tally(sources=tuple(self._config.rewards), step=0, is_dead=lambda _version, _step: False)
