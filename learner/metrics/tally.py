"""Sums over a step's samples and tokens, across all ranks, and the metrics computed from them.

Every rank adds its own; two all-reduces later each has the totals. The names of our sums are fixed, so ranks agree on
their order without communication, even if one of them got no group. A loss names its own metrics and an agent its
rewards, which may differ in each step: ranks first exchange the names, which takes as long as the two all-reduces (2 ms
between two ranks, 10 among four on two cores), and costs a single rank nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from streamrl.learner.metrics.routers import of_routers
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample
from streamrl.recipe.algorithms import num_alike
from streamrl.recipe.losses import MAX_LOG, Metric, TokenBatch, k3, ratios
from streamrl.recipe.names import source_of
from streamrl.telemetry.metrics import OF_LOSS

# Means over a step's samples or groups: name -> what each one adds. A line here, and the name with its meaning in
# `streamrl.telemetry.metrics`, makes a metric. Values that are not finite are left out of the step's record.
OF_SAMPLES: Final[Mapping[str, Callable[[Group, Sample], float]]] = {
    "train_rollouts/rewards": lambda group, sample: sample.reward,
    "train_rollouts/prompt_lengths": lambda group, sample: len(group.prompt_ids),
    "train_rollouts/response_lengths": lambda group, sample: len(sample.token_ids),
    "train_rollouts/generation_length": lambda group, sample: len(group.prompt_ids) + len(sample.token_ids),
    "train_rollouts/turns": lambda group, sample: len(sample.turns()),
    "train_rollouts/branches": lambda group, sample: len(sample.branches),
    "train_rollouts/context_tokens": lambda group, sample: sample.num_context_tokens(len(group.prompt_ids)),
    "train_rollouts/fraction_of_samples_properly_ended": lambda group, sample: sample.finish_reason == "stop",
}

OF_GROUPS: Final[Mapping[str, Callable[[Group], float]]] = {
    "train_rollouts/zero_variance_groups": lambda group: num_alike(group.header.sample_rewards) == len(group.samples),
    "train_rollouts/tool_calls": lambda group: group.header.num_tool_calls / max(1, len(group.samples)),
    "timers/in_model": lambda group: group.header.model_s,
    "timers/in_environment": lambda group: group.header.environment_s,
    "timers/generate": lambda group: group.header.generate_s,
    "timers/reward": lambda group: group.header.reward_s,
}

_SUMS: Final = (
    *("groups", "samples", "reward_squared", "penalty", "baseline"),
    *("in_flight", "in_queue", "lag", "lag_tokens", "dead_tokens", "masked_tokens"),
    *("model_tokens", "flops", "tokens", "ratio_squared", "kl", "kl_tokens"),
    *("fresh_tokens", "fresh_mismatch", "fresh_mismatch_kl"),
)
# Upper edges of the histogram of ratios; each bin begins above the previous edge.
RATIO_EDGES: Final = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0, 5.0, math.inf)
_BINS: Final = tuple(f"policy/ratio_histogram/{edge:g}" for edge in RATIO_EDGES)
# Means over the tokens of all passes.
_OF_TOKENS: Final = (
    *("policy/entropy", "policy/mismatch_kl", "policy/token_mult_prob_error", "policy/ratio_mean"),
    *_BINS,
)
_KNOWN_OF_LOSS: Final = {"clipped": "policy/clipped_fraction", "masked": "policy/masked_fraction"}
_PEAKS: Final = ("lag", "negative_lag", "ratio")

IsDead = Callable[[int, int], bool]  # (version, its step) -> whether it is of an abandoned lineage


class Tally:
    """One step's sums; `metrics` is a collective."""

    def __init__(self, *, sources: Sequence[str], step: int, is_dead: IsDead) -> None:
        self._sums = dict.fromkeys((*_SUMS, *_OF_TOKENS, *OF_SAMPLES, *OF_GROUPS), 0.0)
        self._peaks = dict.fromkeys(_PEAKS, -math.inf)
        self._own: dict[str, npt.NDArray[np.float64]] = {}  # (sum, count) of each of the loss's own metrics
        self._scored: dict[str, list[float]] = {}  # sum, that of squares, and count of rewards, by source
        self._routers: npt.NDArray[np.float64] | None = None  # [layers, E + 2]; for a mixture of experts
        self._router_tokens = 0
        self._routes = np.zeros(3)  # as in `add_routes`
        self._sources, self._step, self._is_dead = tuple(sources), step, is_dead

    def add_group(
        self, group: Group, baselines: npt.NDArray[np.float64], penalties: npt.NDArray[np.float64]
    ) -> None:  # [n] each
        self._add("groups", 1)
        self._add("samples", len(group.samples))
        self._add("penalty", penalties.sum())
        self._add("baseline", baselines.sum())
        for name, of_group in OF_GROUPS.items():
            self._add(name, of_group(group))
        for sample in group.samples:
            for name, of_sample in OF_SAMPLES.items():
                self._add(name, of_sample(group, sample))
            self._add_sample(sample)

    def staleness(self, sample: Sample) -> npt.NDArray[np.int64]:  # [T]
        """Steps between the weights that made each token and the current ones; 0 for tokens that were not generated."""
        ages = np.zeros(len(sample.token_ids), dtype=np.int64)
        for span in sample.spans:
            ages[span.start : span.end] = max(0, self._step - span.step)
        return ages

    def is_fresh(self, sample: Sample) -> bool:
        """Whether this step's weights generated the whole sample; then engine and learner should agree on its tokens.

        A sample begun by older weights has their keys and values, so even its last tokens are not exactly the newest
        version's.
        """
        return all(span.step == self._step and not self._is_dead(span.version, span.step) for span in sample.spans)

    @torch.no_grad()
    def add_tokens(
        self,
        batch: TokenBatch,
        entropy: torch.Tensor,  # [T]
        own: Mapping[str, Metric],  # the loss's own metrics
        *,
        fresh: torch.Tensor | None,  # [T] bool, of the token's sample; None: an earlier pass changed the weights
    ) -> None:
        """Add the tokens of one pass. All values move to the CPU at once: each transfer stalls a GPU."""
        num_tokens = len(batch.logprobs)
        if num_tokens == 0:
            return
        difference = batch.behaviour_logprobs - batch.logprobs
        ratio = ratios(batch.logprobs, batch.behaviour_logprobs).double()
        edges = torch.tensor(RATIO_EDGES[:-1], dtype=ratio.dtype, device=ratio.device)
        bin_of = torch.bucketize(ratio, edges)
        found = {
            "policy/entropy": entropy.sum(),
            "policy/mismatch_kl": difference.sum(),
            "policy/token_mult_prob_error": difference.clamp(-MAX_LOG, MAX_LOG).abs().exp().sum(),
            "policy/ratio_mean": ratio.sum(),
            "ratio_squared": (ratio**2).sum(),
        }
        found |= {name: (bin_of == at).sum() for at, name in enumerate(_BINS)}
        if fresh is not None:
            found |= _of_fresh(difference.double(), fresh)
        pairs = [metric if isinstance(metric, tuple) else (metric.sum(), num_tokens) for metric in own.values()]
        values = _to_cpu([ratio.max(), *found.values(), *(value for pair in pairs for value in pair)])
        self._peak("ratio", values[0])
        self._add("tokens", num_tokens)
        for name, value in zip(found, values[1:], strict=False):
            self._add(name, value)
        for at, name in enumerate(own):
            begin = 1 + len(found) + 2 * at
            self._own[name] = self._own.get(name, np.zeros(2)) + values[begin : begin + 2]

    def add_routes(self, counts: torch.Tensor) -> None:  # [3]
        """Add counts of (token, expert layer) pairs: all; those with a route; of these, those routed differently."""
        self._routes += counts.cpu().numpy()

    def add_reference(self, behaviour_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> None:
        self._add("kl", float((behaviour_logprobs - reference_logprobs).sum()))
        self._add("kl_tokens", len(behaviour_logprobs))

    def add_work(self, *, num_tokens: int, flops: float) -> None:
        """Add one pass: tokens of trained samples with their prompts, and its FLOPs."""
        self._add("model_tokens", num_tokens)
        self._add("flops", flops)

    def add_routers(self, sums: npt.NDArray[np.float64], *, num_tokens: int) -> None:  # [layers, E + 2]
        """Add a micro-batch of any pass: tokens per expert, and sums of entropy and z."""
        self._routers = sums if self._routers is None else self._routers + sums
        self._router_tokens += num_tokens

    def add_masked(self, num_tokens: int) -> None:
        """Add tokens that were too old for a loss."""
        self._add("masked_tokens", num_tokens)

    def metrics(self, world: World) -> dict[str, float]:
        gathered = world.gather_bytes(json.dumps([list(self._own), list(self._scored)]).encode())
        names, sources = (sorted({*chain(*of_ranks)}) for of_ranks in zip(*map(json.loads, gathered), strict=True))
        own = [self._own.get(name, np.zeros(2)) for name in names]
        scored = [self._scored.get(name, [0.0, 0.0, 0.0]) for name in sources]
        of_data = np.concatenate([list(self._sums.values()), *own, *scored])
        once = of_data if world.reports_samples else np.zeros_like(of_data)  # others have seen the same data
        ends = np.cumsum([len(self._routes), len(self._sums), 2 * len(names)])
        routes, fixed, of_loss, of_sources = np.split(world.total(np.concatenate([self._routes, once])), ends)
        sums = dict(zip(self._sums, fixed.tolist(), strict=True))
        peaks = dict(zip(self._peaks, world.largest(np.array(list(self._peaks.values()))).tolist(), strict=True))
        found = {**_of_rollouts(sums), **_of_tokens(sums, peaks), **_of_lag(sums, peaks)}
        found |= _of_routes(*routes.tolist())
        found |= _of_sources(dict(zip(sources, of_sources.reshape(-1, 3).tolist(), strict=True)))
        found |= _of_loss(dict(zip(names, of_loss.reshape(-1, 2).tolist(), strict=True)))
        if self._routers is not None:  # then on all ranks, whatever groups they got
            found |= of_routers(world.total(np.append(self._routers, self._router_tokens)), len(self._routers))
        found["throughput/tokens"] = sums["model_tokens"]
        found["throughput/tflop"] = sums["flops"] / 1e12
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _add(self, name: str, value: float) -> None:
        self._sums[name] += value

    def _peak(self, name: str, value: float) -> None:
        self._peaks[name] = max(self._peaks[name], value)

    def _add_sample(self, sample: Sample) -> None:
        self._add("reward_squared", sample.reward * sample.reward)  # may be inf, where `**` would raise
        for name, reward in sample.rewards.items():  # of the sources that apply to it
            if source_of(name) in self._sources:
                total, squares, count = self._scored.get(name, (0.0, 0.0, 0.0))
                self._scored[name] = [total + reward, squares + reward * reward, count + 1]
        trained = sample.loss_mask()
        for span in sample.spans:
            lag, num_tokens = max(0, self._step - span.step), int(trained[span.start : span.end].sum())
            if num_tokens == 0:  # too old for a loss, or not this model's
                continue
            self._add("lag", lag * num_tokens)
            self._add("lag_tokens", num_tokens)
            self._add("dead_tokens", num_tokens * self._is_dead(span.version, span.step))
            self._peak("lag", lag)
            self._peak("negative_lag", -lag)
        if sample.spans:
            by_age = sorted(sample.spans, key=lambda span: span.version)  # their own order is that of the sample's rows
            self._add("in_flight", max(0, by_age[-1].step - by_age[0].step))
            self._add("in_queue", max(0, self._step - by_age[-1].step))


def _to_cpu(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Sums of tensors, on any device, and plain numbers; one transfer for all tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sums = iter(torch.stack([value.sum().to(tensors[0].device, torch.float64) for value in tensors]).tolist())
    return [next(sums) if isinstance(value, torch.Tensor) else float(value) for value in values]


def _of_fresh(difference: torch.Tensor, fresh: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mismatch sums over fresh tokens. `difference`: log mu - log pi.

    Uses `where` instead of indexing, whose result size would force a GPU sync.
    """
    zero = torch.zeros_like(difference)
    return {
        "fresh_tokens": fresh.sum(),
        "fresh_mismatch": torch.where(fresh, difference.abs(), zero).sum(),
        "fresh_mismatch_kl": torch.where(fresh, k3(difference, zero), zero).sum(),
    }


def _of_rollouts(sums: Mapping[str, float]) -> dict[str, float]:
    groups, samples = max(1.0, sums["groups"]), max(1.0, sums["samples"])
    mean = sums["train_rollouts/rewards"] / samples
    return {
        **{name: sums[name] / samples for name in OF_SAMPLES},
        **{name: sums[name] / groups for name in OF_GROUPS},
        "train_rollouts/rollout_size": sums["samples"],
        "train_rollouts/rewards_std": math.sqrt(max(0.0, sums["reward_squared"] / samples - mean * mean)),
        "train_rollouts/rewards_with_kl": mean - sums["penalty"] / samples,
        "train_rollouts/baseline": sums["baseline"] / samples,
    }


def _of_sources(scored: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {name: total / count for name, (total, _, count) in scored.items()}
    variances = {name: squares / count - means[name] * means[name] for name, (_, squares, count) in scored.items()}
    return {
        **{f"train_rollouts/rewards/{name}": mean for name, mean in means.items()},
        **{f"train_rollouts/rewards_std_by_source/{name}": math.sqrt(max(0.0, v)) for name, v in variances.items()},
    }


def _of_tokens(sums: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, float]:
    if sums["tokens"] == 0:
        return {}
    tokens = sums["tokens"]
    found = {
        **{name: sums[name] / tokens for name in _OF_TOKENS},
        "policy/ratio_max": peaks["ratio"],
        **dict.fromkeys(_KNOWN_OF_LOSS.values(), 0.0),  # for losses without such a bound
        "policy/fresh_tokens": sums["fresh_tokens"],
    }
    if sums["fresh_tokens"] > 0:
        found["policy/fresh_mismatch"] = sums["fresh_mismatch"] / sums["fresh_tokens"]
        found["policy/fresh_mismatch_kl"] = sums["fresh_mismatch_kl"] / sums["fresh_tokens"]
    if sums["ratio_squared"] > 0:
        found["policy/ess"] = sums["policy/ratio_mean"] ** 2 / sums["ratio_squared"] / tokens
    if sums["kl_tokens"] > 0:
        found["train_rollouts/init_policy_kl"] = sums["kl"] / sums["kl_tokens"]
    return found


def _of_routes(pairs: float, known: float, differing: float) -> dict[str, float]:
    missing = {"router/routes_missing": 1 - known / pairs} if pairs else {}
    return {**missing, "router/routes_differ": differing / known} if known else missing


def _of_loss(pairs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {_KNOWN_OF_LOSS.get(name, OF_LOSS + name): total / n for name, (total, n) in pairs.items() if n > 0}


def _of_lag(sums: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, float]:
    if sums["lag_tokens"] == 0:
        return {}
    return {
        "lag/min": 0.0 - peaks["negative_lag"],
        "lag/mean": sums["lag"] / sums["lag_tokens"],
        "lag/max": peaks["lag"],
        "lag/in_flight": sums["in_flight"] / sums["samples"],
        "lag/in_queue": sums["in_queue"] / sums["samples"],
        "lag/dead_lineage_tokens": sums["dead_tokens"],
        "lag/masked_tokens": sums["masked_tokens"],
    }
