"""From this rank's groups to gradients in the policy's parameters: the objective, as it is computed.

    groups ─ select ─► pieces ─ pack ─► micro-batches          as many on every rank, padded with empty ones
                          │                  │
             N, T over all ranks       reference log-probs     only when the algorithm asks for them
                          │                  ▼
                          │            advantages              a number a sample, from its own group alone
                          ▼                  ▼
        loss = sum over tokens of weight_t * loss_t            backward after each micro-batch

Collectives: the denominators, the number of micro-batches, and FSDP's own; each blocks until every rank has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.base import Advantages, Algorithm, Selection, Tokens
from learner.distributed import World
from learner.model import Policy
from learner.packing import MicroBatch, Piece, empty_micro_batch, pack
from learner.tally import Tally
from streamrl.config import schema
from streamrl.wire.group import Group

Reference = Callable[[MicroBatch], torch.Tensor]  # [T] log-probs under the frozen policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    loss: float  # this rank's share of the global loss
    init_logprobs_s: float
    logprobs_s: float


class Gradients:
    def __init__(
        self,
        *,
        policy: Policy,
        reference: Reference | None,  # asked only when the algorithm needs it
        algorithm: Algorithm,
        config: schema.Config,
        world: World,
        beat: Callable[[], None],  # called after each micro-batch: a long step is no stall
    ) -> None:
        assert reference is not None or not algorithm.needs_reference
        self._policy, self._reference, self._algorithm = policy, reference, algorithm
        self._loss_mean = config.algorithm.loss_mean
        self._max_tokens = config.training.micro_batch_tokens
        self._world, self._beat = world, beat

    def accumulate(self, groups: Sequence[Group], tally: Tally) -> Accumulated:
        """Add the gradient of the global loss; `groups` are those of this rank that all ranks accepted."""
        selections = [self._algorithm.select(group) for group in groups]
        pieces = _pieces(groups, selections)
        weights = self._sample_weights(pieces, selections)
        batches = self._micro_batches(pieces)
        tally.add_work(num_tokens=sum(piece.num_tokens for piece in pieces))

        started = time.perf_counter()
        logrefs = [self._ask_reference(batch) for batch in batches]
        referred = time.perf_counter()
        advantages = self._advantages(groups, batches, logrefs, tally)
        loss = 0.0
        for batch, logref in zip(batches, logrefs, strict=True):
            loss += self._backward(batch, logref, advantages=advantages, weights=weights, tally=tally)
        return Accumulated(
            loss=loss,
            init_logprobs_s=referred - started,
            logprobs_s=time.perf_counter() - referred,
        )

    def _backward(
        self,
        batch: MicroBatch,
        logref: torch.Tensor | None,
        *,
        advantages: torch.Tensor,
        weights: torch.Tensor,
        tally: Tally,
    ) -> float:
        out = self._policy(batch)
        logmu = batch.logmu.to(out.logp.dtype)
        tokens = Tokens(logmu=logmu, logref=logref, advantage=advantages[batch.sample].to(out.logp.dtype))
        losses = self._algorithm.loss(out.logp, tokens)
        loss = (weights[batch.sample].to(out.logp.dtype) * losses.values).sum()
        # FSDP takes the mean over ranks of what is to be a sum.
        (loss * self._world.size).backward()
        tally.add_tokens(out, logmu, losses)
        self._beat()
        return float(loss.detach())

    def _sample_weights(self, pieces: Sequence[Piece], selections: Sequence[Selection]) -> torch.Tensor:
        """[samples] what each trained token of a sample weighs in the loss, with denominators over all ranks."""
        counted = sum(int(selection.counted.sum()) for selection in selections)
        num_trained = {piece.sample: int(piece.mask.sum()) for piece in pieces}
        totals = self._world.total(np.array([counted, sum(num_trained.values())], dtype=np.float64))
        weights = torch.zeros(sum(len(selection.trained) for selection in selections), dtype=torch.float64)
        for sample, length in num_trained.items():
            weights[sample] = 1 / (totals[0] * length) if self._loss_mean == "sequence" else 1 / totals[1]
        return weights.to(self._world.device)

    def _micro_batches(self, pieces: Sequence[Piece]) -> list[MicroBatch]:
        batches = pack(pieces, max_tokens=self._max_tokens, shape=self._policy.shape)
        most = int(self._world.largest(np.array([len(batches)], dtype=np.float64))[0])
        batches += [empty_micro_batch() for _ in range(most - len(batches))]
        return [batch.to(self._world.device) for batch in batches]

    def _ask_reference(self, batch: MicroBatch) -> torch.Tensor | None:
        return self._reference(batch) if self._reference is not None and self._algorithm.needs_reference else None

    def _advantages(
        self,
        groups: Sequence[Group],
        batches: Sequence[MicroBatch],
        logrefs: Sequence[torch.Tensor | None],
        tally: Tally,
    ) -> torch.Tensor:  # [samples]
        penalties = self._penalties(sum(len(group.samples) for group in groups), batches, logrefs, tally)
        judged: list[Advantages] = []
        start = 0
        for group in groups:
            own = penalties[start : start + len(group.samples)]
            judged.append(self._algorithm.advantages(group, own))
            tally.add_group(group, judged[-1], own)
            start += len(group.samples)
        values = np.concatenate([a.values for a in judged]) if judged else np.zeros(0)
        return torch.from_numpy(values).to(self._world.device)

    def _penalties(
        self,
        num_samples: int,
        batches: Sequence[MicroBatch],
        logrefs: Sequence[torch.Tensor | None],
        tally: Tally,
    ) -> npt.NDArray[np.float64]:  # [samples] mean over a sample's trained tokens
        total = torch.zeros(num_samples, dtype=torch.float64, device=self._world.device)
        count = torch.zeros_like(total)
        for batch, logref in zip(batches, logrefs, strict=True):
            if logref is not None:
                logmu = batch.logmu.to(logref.dtype)
                penalty = self._algorithm.penalty(logmu, logref).double()
                total.index_add_(0, batch.sample, penalty)
                count.index_add_(0, batch.sample, torch.ones_like(penalty))
                tally.add_reference(logmu, logref)
        penalties: npt.NDArray[np.float64] = (total / count.clamp(min=1)).cpu().numpy()
        return penalties


def _pieces(groups: Sequence[Group], selections: Sequence[Selection]) -> list[Piece]:
    """The samples with something to train; an empty response has nothing."""
    found: list[Piece] = []
    sample_index = 0
    for g, (group, selection) in enumerate(zip(groups, selections, strict=True)):
        for sample, trained in zip(group.samples, selection.trained, strict=True):
            mask = sample.loss_mask()
            if trained and mask.any():
                found.append(
                    Piece(
                        sample=sample_index,
                        group=g,
                        prompt_ids=group.prompt_ids,
                        token_ids=sample.token_ids,
                        logmu=sample.logprobs,
                        mask=mask,
                    )
                )
            sample_index += 1
    return found
