"""The routers of a mixture: what they say of a step's trained tokens, the terms of the loss that draw on it, and how
they are kept as they are.

    balance   E / k * mean over layers of sum over experts of f P     f: share of the trained tokens that went to it
    z         mean over layers and trained tokens of logsumexp^2      P: mean of its probability

Both are over the trained tokens of the whole step, of all ranks and micro-batches, each as often as it is trained: so
neither packing nor layout changes them. f is no function of the weights, but a step's f is known when all its tokens
have been routed: a pass without gradient counts them first, which takes about a quarter of a step's computing, and is
made only where `model.router_balance` is above 0.

Listening is hooks, which say nothing outside of a `listening`: not in a reference's pass, nor where layers are computed
again. Collectives: those of the pass that counts, and the sum of what it counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.experts import experts_of, refuse_experts
from streamrl.learner.model.packing import MicroBatch
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.process.ranks import World

_BIASED = "e_score_correction_bias"  # of a router that is balanced by a bias of its own, and chooses by sigmoids


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """In one pass, layer by layer."""

    logits: list[torch.Tensor] = field(default_factory=list)  # [cells, E]
    chosen: list[torch.Tensor] = field(default_factory=list)  # [cells, k]

    def loads(self, index: torch.Tensor) -> torch.Tensor:  # [T] of the cells that count -> [layers, E]
        """How many of them went to each expert."""
        found = []
        for logits, chosen in zip(self.logits, self.chosen, strict=True):
            experts = chosen[index].flatten()
            none = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
            found.append(none.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.float64)))
        return torch.stack(found)

    def wide(self, index: torch.Tensor) -> torch.Tensor:  # [layers, T, E]
        """Logits of the cells that count, in 32 bits or more."""
        logits = torch.stack([each[index] for each in self.logits])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Routers:
    """Of a model that has some, one for each layer of experts."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._said: Said | None = None
        for (router, place), experts in zip(_routers(model), [module for _, module in experts_of(model)], strict=True):
            router.register_forward_hook(lambda _module, _args, out, place=place: self._hear_logits(out, place))
            experts.register_forward_pre_hook(lambda _module, args: self._hear_choice(args))

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Routers | None:
        return cls(model) if has_routers(model) else None

    @contextmanager
    def listening(self) -> Iterator[Said]:
        """What is said in the passes inside."""
        self._said = said = Said()
        try:
            yield said
        finally:
            self._said = None

    def _hear_logits(self, out: Any, place: int) -> None:
        if self._said is not None:
            self._said.logits.append(out[place] if isinstance(out, tuple) else out)

    def _hear_choice(self, args: Sequence[torch.Tensor]) -> None:
        if self._said is not None:
            self._said.chosen.append(args[1])


def has_routers(model: transformers.PreTrainedModel) -> bool:
    num = len(_routers(model))
    return num > 0 and num == sum(1 for _ in experts_of(model))


def prepare_mixture(model: transformers.PreTrainedModel, config: schema.Config) -> None:
    """Routers frozen, where they are to be; ConfigError where a setting asks for what the model has not."""
    refuse_experts(model, config.learner.layout.experts)
    settings = config.model
    asked = _asked(settings)
    if not asked:
        return
    kind = type(model).__name__
    if not has_routers(model):
        raise ConfigError(f"{asked[0]}: {kind} has no routers that are known; leave it out")
    if settings.router_balance and any(hasattr(router, _BIASED) for router, _ in _routers(model)):
        raise ConfigError(
            f"model.router_balance = {settings.router_balance:g}: routers of {kind} are balanced by a bias of their "
            f"own; set it to 0"
        )
    if settings.router == "frozen":
        for router, _ in _routers(model):
            router.requires_grad_(False)


def _asked(settings: schema.Model) -> list[str]:
    found = [f"model.router = {settings.router}"] if settings.router == "frozen" else []
    of_loss = {"router_balance": settings.router_balance, "router_z": settings.router_z}
    return found + [f"model.{name} = {value:g}" for name, value in of_loss.items() if value]


def _routers(model: transformers.PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """(module, the place of logits in what it returns) of each, as transformers itself finds them."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return []
    return [
        (module, recorder.index)
        for name, module in model.named_modules()
        if isinstance(module, recorder.target_class) and name.endswith(recorder.layer_name or "")
    ]


class RouterTerms:
    """What a policy's routers add to the loss of a step, and tell of it; nothing, of a policy without routers."""

    def __init__(self, policy: Policy, settings: schema.Model, world: World, beat: Callable[[], None]) -> None:
        self._policy, self._world, self._beat = policy, world, beat
        self._balance, self._z = settings.router_balance, settings.router_z
        self._routers = Routers.of(policy.model)
        self._said: Said | None = None  # in the last pass
        self._loads: torch.Tensor | None = None  # [layers, E] of the step's trained tokens

    def count(self, batches: Sequence[MicroBatch]) -> None:
        """Which experts the trained tokens of the step go to, where the loss asks for it. A collective, and a pass."""
        if self._routers is None or not self._balance or not batches:
            return
        found = []
        for batch in batches:
            with evaluating(self._policy), self._routers.listening() as said:
                self._policy(batch)
            found.append(said.loads(self._index(batch)))
            self._beat()
        own = torch.stack(found).sum(0)
        self._loads = torch.from_numpy(self._world.total(own.cpu().numpy())).to(self._world.device)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the pass that learns."""
        if self._routers is None:
            yield
        else:
            with self._routers.listening() as self._said:
                yield

    def term(self, batch: MicroBatch, *, num_trained: float) -> torch.Tensor | float:
        """Of the loss, what these tokens add. `num_trained`: those of the whole step."""
        if self._said is None or not (self._balance or self._z):
            return 0.0
        logits = self._said.wide(self._index(batch))  # [layers, T, E]
        num_layers, _, num_experts = logits.shape
        found = self._z * logits.logsumexp(-1).square().sum()
        if self._loads is not None:
            shares = (self._loads / self._loads.sum(1, keepdim=True).clamp(min=1)).to(logits.dtype)  # f / k
            found = found + self._balance * num_experts * (logits.softmax(-1).sum(1) * shares).sum()
        return self._of_group(found / (num_layers * max(1.0, num_trained)))

    def _of_group(self, term: torch.Tensor) -> torch.Tensor:
        """With the value of a context group, of which one rank speaks, and the gradient of this rank."""
        if self._world.context_group is None:
            return term
        whole = term.detach().clone()
        dist.all_reduce(whole, group=self._world.context_group)
        return term + (whole - term).detach()

    def _index(self, batch: MicroBatch) -> torch.Tensor:
        """[T] the cells of this rank that predict trained tokens."""
        return batch.index if self._policy.parts is None else self._policy.parts.cut(batch).index

    @torch.no_grad()
    def tell(self, batch: MicroBatch, tally: Tally) -> None:
        """Of each layer the tokens that went to each expert, and sums of entropy and of logsumexp^2."""
        if self._said is None:
            return
        index = self._index(batch)
        logits = self._said.wide(index)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum((1, 2)).double()
        z = logits.logsumexp(-1).square().sum(1).double()
        sums = torch.cat([self._said.loads(index), entropy[:, None], z[:, None]], dim=1)
        tally.add_routers(sums.cpu().numpy(), num_tokens=len(index))
        self._said = None
