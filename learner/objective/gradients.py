"""Turns this rank's groups into gradients; `learner.objective.optimizer` turns those into a step.

    prepare      groups ─ select ─► pieces ─ pack ─► micro-batches     same number on every rank, padded with empty ones
                              │                   │
                 N, T over all ranks     reference log-probs           only if the algorithm needs them
                              │          teacher log-probs             if there is a teacher; or as sent by workers
                              │                   ▼
                              │             advantages                 within each sample's group, then over the batch
                              ▼                   ▼
    accumulate   loss = sum over tokens of weight_t * loss_t           backward after each micro-batch

A batch is prepared once and may be used for several passes. The first pass records the policy's log-probs before any
update (pi_p), the reference point of the later ones.

Collectives: the denominators, the advantages' moments, the number of micro-batches, and FSDP's own; each blocks until
every rank has joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.logprobs import LogProbs
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import FrozenLogprobs, Teacher
from streamrl.learner.objective.router_losses import RouterTerms
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape
from streamrl.learner.packing.pack import empty_micro_batch, pack
from streamrl.learner.parallel.fsdp import let_replicas_add_up
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.routes import joined
from streamrl.protocol.wire.sample import Sample
from streamrl.recipe.advantages import STD_FLOOR, PerToken, discounted
from streamrl.recipe.algorithms import Algorithm, Selection
from streamrl.recipe.losses import TokenBatch
from streamrl.recipe.teaching import with_teacher_term


@dataclass(slots=True, kw_only=True)  # not frozen: passes fill `proximal_logprobs`, and replace micro-batches in replay
class Batch:
    """This rank's share of a step, ready for its passes.

    All responses are concatenated; a token's index is its sample's `begins` plus its position in the response.
    """

    micro_batches: list[MicroBatch]
    reference_logprobs: Sequence[torch.Tensor | None]  # a tensor [T] for each micro-batch
    begins: torch.Tensor  # [samples] start of each response
    advantages: torch.Tensor  # [tokens of responses] float64
    staleness: torch.Tensor  # [tokens of responses] steps
    teacher_logprobs: torch.Tensor | None  # [tokens of responses]
    weights: torch.Tensor  # [samples] float64: weight of each trained token in the loss
    fresh: torch.Tensor  # [samples] bool: generated entirely by the weights of the first pass
    num_trained: float  # trained tokens of the step, over all ranks
    num_tokens: int  # of all trained samples, prompts included
    flops: float  # of one pass
    proximal_logprobs: list[torch.Tensor] = field(default_factory=list)  # [T] each, filled by the first pass


class Gradients:
    def __init__(
        self,
        *,
        policy: Policy,
        reference: FrozenLogprobs | None,  # used only if the algorithm needs it
        algorithm: Algorithm,
        config: schema.Config,
        world: World,
        beat: Callable[[], None],  # watchdog beat after each micro-batch: a long step is not a stall
        teacher: Teacher | None = None,  # on the ranks; None: no teacher, or the workers query it
    ) -> None:
        assert reference is not None or not algorithm.needs_reference
        self._teacher, self._teaching = teacher, config.teacher
        self._policy, self._algorithm = policy, algorithm
        self._reference = reference if algorithm.needs_reference else None
        self._settings = config.algorithm
        self._max_tokens = config.training.micro_batch_tokens
        self._max_response = config.max_response_tokens
        self._world, self._beat = world, beat
        self._routers = RouterTerms(policy, config.model, world, beat)

    def prepare(self, groups: Sequence[Group], tally: Tally) -> Batch:
        """Build the batch from this rank's groups that all ranks accepted."""
        selections = [self._algorithm.select(group) for group in groups]
        pieces = _pieces(groups, selections)
        micro_batches = self._micro_batches(pieces, self._policy.shape)
        reference_logprobs = self._ask_reference(micro_batches)
        samples = [sample for group in groups for sample in group.samples]
        lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
        penalties = self._penalties(len(samples), micro_batches, reference_logprobs, tally)
        advantages = self._advantages(groups, pieces, penalties, tally)
        staleness = [tally.staleness(sample) for sample in samples]
        fresh = torch.tensor([tally.is_fresh(sample) for sample in samples], dtype=torch.bool)
        begins = (lengths.cumsum(0) - lengths).to(self._world.device)
        weights, num_trained = self._sample_weights(pieces, selections)
        return Batch(
            micro_batches=micro_batches,
            reference_logprobs=reference_logprobs,
            begins=begins,
            advantages=torch.from_numpy(np.concatenate([np.zeros(0), *advantages])).to(self._world.device),
            staleness=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *staleness])).to(self._world.device),
            teacher_logprobs=self._teacher_logprobs(samples, pieces, begins),
            weights=weights,
            fresh=fresh.to(self._world.device),
            num_trained=num_trained,
            num_tokens=sum(piece.num_tokens for piece in pieces),
            flops=self._policy.flops.of_pass(pieces),
        )

    def accumulate(self, batch: Batch, tally: Tally) -> float:
        """Make one pass, adding the gradient of the global loss; return this rank's share of that loss."""
        first = not batch.proximal_logprobs
        loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._routers.count(batch.micro_batches)
        for at, micro_batch in enumerate(batch.micro_batches):
            let_replicas_add_up(self._policy, now=at + 1 == len(batch.micro_batches))
            with self._routers.capturing():
                out = self._policy(micro_batch, entropy_learns=self._algorithm.needs_entropy)
            if first:
                batch.proximal_logprobs.append(out.logp.detach())
            if self._policy.replay is not None:
                batch.micro_batches[at] = self._policy.replay.passed(micro_batch, tally, first=first)
            loss += self._backward(batch, at, out, tally, first=first)
            self._beat()
        tally.add_work(num_tokens=batch.num_tokens, flops=batch.flops)
        return float(loss)

    def _backward(self, batch: Batch, at: int, out: LogProbs, tally: Tally, *, first: bool) -> torch.Tensor:
        micro_batch, dtype = batch.micro_batches[at], out.logp.dtype
        place = batch.begins[micro_batch.sample] + micro_batch.position
        tokens = TokenBatch(
            logprobs=out.logp,
            behaviour_logprobs=micro_batch.behaviour_logprobs.to(dtype),
            proximal_logprobs=batch.proximal_logprobs[at],
            reference_logprobs=batch.reference_logprobs[at],
            teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[place].to(dtype),
            entropy=out.entropy if self._algorithm.needs_entropy else None,
            advantages=batch.advantages[place].to(dtype),
            staleness=batch.staleness[place],
            sample=micro_batch.sample,
            num_samples=len(batch.begins),
        )
        values, metrics = self._algorithm.loss(tokens)
        if self._teaching is not None:
            values, metrics = with_teacher_term(values, metrics, tokens, weight=self._teaching.weight)
        loss = (batch.weights[micro_batch.sample].to(dtype) * values).sum()
        loss = loss + self._routers.term(micro_batch, num_trained=batch.num_trained)
        # FSDP averages over ranks; the loss needs a sum.
        (loss * self._world.addends).backward()
        self._routers.add_metrics(micro_batch, tally)
        fresh = batch.fresh[micro_batch.sample] if first else None
        tally.add_tokens(tokens, out.entropy.detach(), metrics, fresh=fresh)
        return loss.detach().double()

    def _sample_weights(self, pieces: Sequence[Piece], selections: Sequence[Selection]) -> tuple[torch.Tensor, float]:
        """Return ([samples] loss weight of each trained token, number of trained tokens over all ranks).

        The weights' denominators are taken over all ranks.
        """
        counted = sum(int(selection.counted.sum()) for selection in selections)
        num_trained = {piece.sample: int(piece.mask.sum()) for piece in pieces}
        totals = self._world.total_of_data(np.array([counted, sum(num_trained.values())], dtype=np.float64))
        weights = torch.zeros(sum(len(selection.trained) for selection in selections), dtype=torch.float64)
        for sample, length in num_trained.items():
            weights[sample] = 1 / self._divisor(length, num_counted=totals[0], num_tokens=totals[1])
        return weights.to(self._world.device), float(totals[1])

    def _divisor(self, length: int, *, num_counted: float, num_tokens: float) -> float:
        """The divisor of the token losses of a sample of this length."""
        match self._settings.loss_mean:
            case "sequence":
                return num_counted * length
            case "token":
                return num_tokens
            case "sum":
                return num_counted
            case "max_tokens":
                return num_counted * self._max_response

    def _ask_reference(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:  # [T] each
        if self._reference is None:
            return [None] * len(micro_batches)
        found: list[torch.Tensor | None] = []
        for batch in micro_batches:
            found.append(self._reference(batch))
            self._beat()
        return found

    def _teacher_logprobs(
        self, samples: Sequence[Sample], pieces: Sequence[Piece], begins: torch.Tensor
    ) -> torch.Tensor | None:  # [tokens of responses]
        if self._teaching is None:
            return None
        if self._teacher is None:
            logprobs = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
            return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *logprobs])).to(self._world.device)
        found = torch.zeros(
            sum(len(sample.token_ids) for sample in samples), dtype=torch.float64, device=self._world.device
        )
        for batch in self._micro_batches(pieces, self._teacher.shape):
            found[begins[batch.sample] + batch.position] = self._teacher.logprobs_of(batch).double()
            self._beat()
        return found

    def _micro_batches(self, pieces: Sequence[Piece], shape: Shape) -> list[MicroBatch]:
        batches = pack(pieces, max_tokens=self._max_tokens, shape=shape)
        most = int(self._world.largest(np.array([len(batches)], dtype=np.float64))[0])
        batches += [empty_micro_batch(shape) for _ in range(most - len(batches))]
        return [batch.to(self._world.device) for batch in batches]

    def _advantages(
        self, groups: Sequence[Group], pieces: Sequence[Piece], penalties: npt.NDArray[np.float64], tally: Tally
    ) -> PerToken:  # samples times [T_i]
        values: PerToken = ()
        for group in groups:
            own = penalties[len(values) : len(values) + len(group.samples)]
            judged = self._algorithm.advantages(group, own)
            tally.add_group(group, judged.baselines, own)
            values += judged.values
        return discounted(self._normalized(values, pieces), self._settings.discount_factor)

    def _normalized(self, values: PerToken, trained: Sequence[Piece]) -> PerToken:
        """Normalise by the mean and std over the trained samples of all ranks, each sample counting once.

        Two collectives, since a difference of squares would lose precision.
        """
        if not self._settings.normalize_batch:
            return values
        own = [values[piece.sample][piece.mask] for piece in trained]
        count, total = self._world.total_of_data(np.array([len(own), sum(each.mean() for each in own)]))
        mean = total / max(1.0, count)
        [squares] = self._world.total_of_data(np.array([float(sum(((each - mean) ** 2).mean() for each in own))]))
        std = np.sqrt(squares / max(1.0, count)) + STD_FLOOR
        return tuple((each - mean) / std for each in values)

    def _penalties(
        self,
        num_samples: int,
        batches: Sequence[MicroBatch],
        reference_logprobs: Sequence[torch.Tensor | None],
        tally: Tally,
    ) -> npt.NDArray[np.float64]:  # [samples] over a sample's trained tokens
        total = torch.zeros(num_samples, dtype=torch.float64, device=self._world.device)
        count = torch.zeros_like(total)
        for batch, reference in zip(batches, reference_logprobs, strict=True):
            if reference is not None:
                behaviour = batch.behaviour_logprobs.to(reference.dtype)
                penalty = self._algorithm.penalty(behaviour, reference).double()
                total.index_add_(0, batch.sample, penalty)
                count.index_add_(0, batch.sample, torch.ones_like(penalty))
                tally.add_reference(behaviour, reference)
        mean = self._settings.kl.reduction == "mean"
        penalties: npt.NDArray[np.float64] = (total / count.clamp(min=1) if mean else total).cpu().numpy()
        return penalties


def _pieces(groups: Sequence[Group], selections: Sequence[Selection]) -> list[Piece]:
    """The samples with trained tokens; an empty response has none."""
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
                        behaviour_logprobs=sample.logprobs,
                        mask=mask,
                        turns=tuple(begin for begin, _ in sample.turns()),
                        branches=sample.branches,
                        routes=joined(group.prompt_routes, sample.routes),
                    )
                )
            sample_index += 1
    return found
