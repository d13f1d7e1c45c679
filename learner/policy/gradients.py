"""From this rank's groups to gradients in the policy's parameters: the objective, as it is computed.

    prepare      groups ─ select ─► pieces ─ pack ─► micro-batches     as many on every rank, padded with empty ones
                              │                   │
                 N, T over all ranks     reference log-probs           only when the algorithm asks for them
                              │                   ▼
                              │             advantages                 of each sample's own group, then of the batch
                              ▼                   ▼
    accumulate   loss = sum over tokens of weight_t * loss_t           backward after each micro-batch

A batch is prepared once and may be passed over several times. Its first pass finds the log-probs of the policy before
all passes (pi_p), which the later ones compare with.

Collectives: the denominators, the advantages' moments, the number of micro-batches, and FSDP's own; each blocks until
every rank has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.base import Advantages, Algorithm, Selection, Tokens
from learner.distributed import World
from learner.metrics.tally import Tally
from learner.policy.logprobs import LogProbs
from learner.policy.packing import MicroBatch, Piece, empty_micro_batch, pack
from learner.policy.policy import Policy
from streamrl.config import schema
from streamrl.wire.group import Group

_STD_FLOOR = 1e-6

Reference = Callable[[MicroBatch], torch.Tensor]  # [T] log-probs under the frozen policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's share of a step, ready to be passed over."""

    micro_batches: Sequence[MicroBatch]
    logrefs: Sequence[torch.Tensor | None]  # a tensor [T] for each micro-batch
    advantages: torch.Tensor  # [samples] float64
    lengths: torch.Tensor  # [samples] tokens of the response
    weights: torch.Tensor  # [samples] float64: of each trained token in the loss
    fresh: torch.Tensor  # [samples] bool: made wholly by the weights that the first pass finds
    num_tokens: int  # of all trained samples with their prompts
    flops: float  # of one pass
    logprox: list[torch.Tensor] = field(default_factory=list)  # [T] for each micro-batch, once the first pass is made


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
        self._settings = config.algorithm
        self._max_tokens = config.training.micro_batch_tokens
        self._world, self._beat = world, beat

    def prepare(self, groups: Sequence[Group], tally: Tally) -> Batch:
        """`groups` are those of this rank that all ranks accepted."""
        selections = [self._algorithm.select(group) for group in groups]
        pieces = _pieces(groups, selections)
        micro_batches = self._micro_batches(pieces)
        logrefs = [self._ask_reference(batch) for batch in micro_batches]
        lengths = [length for group in groups for length in group.header.sample_lengths]
        fresh = [tally.is_fresh(sample) for group in groups for sample in group.samples]
        return Batch(
            micro_batches=micro_batches,
            logrefs=logrefs,
            advantages=self._advantages(groups, pieces, micro_batches, logrefs, tally),
            lengths=torch.tensor(lengths, dtype=torch.int64, device=self._world.device),
            weights=self._sample_weights(pieces, selections),
            fresh=torch.tensor(fresh, dtype=torch.bool, device=self._world.device),
            num_tokens=sum(piece.num_tokens for piece in pieces),
            flops=self._policy.effort.on(pieces),
        )

    def accumulate(self, batch: Batch, tally: Tally) -> float:
        """One pass: add the gradient of the global loss. This rank's share of that loss."""
        first = not batch.logprox
        loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for at, micro_batch in enumerate(batch.micro_batches):
            out = self._policy(micro_batch)
            if first:
                batch.logprox.append(out.logp.detach())
            loss += self._backward(batch, at, out, tally, first=first)
            self._beat()
        tally.add_work(num_tokens=batch.num_tokens, flops=batch.flops)
        return float(loss)

    def _backward(self, batch: Batch, at: int, out: LogProbs, tally: Tally, *, first: bool) -> torch.Tensor:
        micro_batch, dtype = batch.micro_batches[at], out.logp.dtype
        tokens = Tokens(
            logmu=micro_batch.logmu.to(dtype),
            logprox=batch.logprox[at],
            logref=batch.logrefs[at],
            advantage=self._token_advantages(batch, micro_batch).to(dtype),
            sample=micro_batch.sample,
            num_samples=len(batch.advantages),
        )
        losses = self._algorithm.loss(out.logp, tokens)
        loss = (batch.weights[micro_batch.sample].to(dtype) * losses.values).sum()
        # FSDP takes the mean over ranks of what is to be a sum.
        (loss * self._world.size).backward()
        tally.add_tokens(out, tokens.logmu, losses, fresh=batch.fresh[micro_batch.sample] if first else None)
        return loss.detach().double()

    def _token_advantages(self, batch: Batch, micro_batch: MicroBatch) -> torch.Tensor:  # [T]
        values = batch.advantages[micro_batch.sample]
        if self._settings.discount_factor == 1:
            return values
        to_go = batch.lengths[micro_batch.sample] - 1 - micro_batch.position
        return values * self._settings.discount_factor ** to_go.double()

    def _sample_weights(self, pieces: Sequence[Piece], selections: Sequence[Selection]) -> torch.Tensor:
        """[samples] what each trained token of a sample weighs in the loss, with denominators over all ranks."""
        counted = sum(int(selection.counted.sum()) for selection in selections)
        num_trained = {piece.sample: int(piece.mask.sum()) for piece in pieces}
        totals = self._world.total(np.array([counted, sum(num_trained.values())], dtype=np.float64))
        weights = torch.zeros(sum(len(selection.trained) for selection in selections), dtype=torch.float64)
        for sample, length in num_trained.items():
            weights[sample] = 1 / (totals[0] * length) if self._settings.loss_mean == "sequence" else 1 / totals[1]
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
        pieces: Sequence[Piece],
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
        if self._settings.normalize_batch:
            values = self._normalized(values, trained=np.array([piece.sample for piece in pieces], dtype=np.int64))
        return torch.from_numpy(values).to(self._world.device)

    def _normalized(
        self, values: npt.NDArray[np.float64], *, trained: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:  # [samples]
        """By the moments over the trained samples of all ranks; two rounds, since differences of squares cancel."""
        count, total = self._world.total(np.array([len(trained), values[trained].sum()]))
        mean = total / max(1.0, count)
        [squares] = self._world.total(np.array([((values[trained] - mean) ** 2).sum()]))
        normalized: npt.NDArray[np.float64] = (values - mean) / (np.sqrt(squares / max(1.0, count)) + _STD_FLOOR)
        return normalized

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
