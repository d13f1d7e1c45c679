"""Loss terms and metrics of a mixture-of-experts model's routers, over a step's trained tokens.

    balance   E / k * mean over layers of sum over experts of f P     f: share of the trained tokens routed to it
    z         mean over layers and trained tokens of logsumexp^2      P: mean of its probability

Both cover the trained tokens of the whole step, of all ranks and micro-batches, each as often as it is trained, so
neither packing nor layout changes them. f carries no gradient, but is known only once all tokens of the step are
routed: an extra pass without gradient counts them first. It takes about a quarter of a step's computing, and is made
only if `model.router_balance` is above 0.

Collectives: those of the counting pass, and the sum of its counts; each blocks until every rank has joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from streamrl.config import schema
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.moe.routers import RouterOutputs, Routers
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.process.ranks import World


class RouterTerms:
    """Loss terms and metrics of a policy's routers; does nothing for a policy without routers."""

    def __init__(self, policy: Policy, settings: schema.Model, world: World, beat: Callable[[], None]) -> None:
        self._policy, self._world, self._beat = policy, world, beat
        self._balance, self._z = settings.router_balance, settings.router_z
        self._routers = Routers.of(policy.model)
        self._captured: RouterOutputs | None = None  # router outputs of the last pass
        self._loads: torch.Tensor | None = None  # [layers, E] trained tokens of the step per expert

    def count(self, batches: Sequence[MicroBatch]) -> None:
        """Count the step's trained tokens per expert, if the loss needs it. One forward pass, and a collective."""
        if self._routers is None or not self._balance or not batches:
            return
        found = []
        for batch in batches:
            with evaluating(self._policy), self._routers.capturing() as outputs:
                self._policy(batch)
            found.append(outputs.loads(self._index(batch)))
            self._beat()
        own = torch.stack(found).sum(0)
        self._loads = torch.from_numpy(self._world.total(own.cpu().numpy())).to(self._world.device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture router outputs during the training pass."""
        if self._routers is None:
            yield
        else:
            with self._routers.capturing() as self._captured:
                yield

    def term(self, batch: MicroBatch, *, num_trained: float) -> torch.Tensor | float:
        """The loss term of these tokens. `num_trained`: trained tokens of the whole step."""
        if self._captured is None or not (self._balance or self._z):
            return 0.0
        logits = self._captured.wide(self._index(batch))  # [layers, T, E]
        num_layers, _, num_experts = logits.shape
        found = self._z * logits.logsumexp(-1).square().sum()
        if self._loads is not None:
            shares = (self._loads / self._loads.sum(1, keepdim=True).clamp(min=1)).to(logits.dtype)  # f / k
            found = found + self._balance * num_experts * (logits.softmax(-1).sum(1) * shares).sum()
        return self._of_group(found / (num_layers * max(1.0, num_trained)))

    def _of_group(self, term: torch.Tensor) -> torch.Tensor:
        """The term with its value summed over the context group, and the gradient of this rank alone.

        Only one rank of the group reports the loss.
        """
        if self._world.context_group is None:
            return term
        whole = term.detach().clone()
        dist.all_reduce(whole, group=self._world.context_group)
        return term + (whole - term).detach()

    def _index(self, batch: MicroBatch) -> torch.Tensor:
        """[T] this rank's cells that predict trained tokens."""
        return batch.index if self._policy.split is None else self._policy.split.cut(batch).index

    @torch.no_grad()
    def add_metrics(self, batch: MicroBatch, tally: Tally) -> None:
        """Add to the tally, for each layer, the tokens per expert and the sums of entropy and logsumexp^2."""
        if self._captured is None:
            return
        index = self._index(batch)
        logits = self._captured.wide(index)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum((1, 2)).double()
        z = logits.logsumexp(-1).square().sum(1).double()
        sums = torch.cat([self._captured.loads(index), entropy[:, None], z[:, None]], dim=1)
        tally.add_routers(sums.cpu().numpy(), num_tokens=len(index))
        self._captured = None
