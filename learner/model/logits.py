"""Reductions over a chunk of logits [tokens, vocabulary], and their gradient, for `logprobs`.

    in place     operations on fp32 copies, each of which reads and writes the whole chunk; least memory
    compiled     the same as two functions for torch's compiler: the projection's output is read twice on the way there,
                 and once on the way back, which writes the gradient in the head's dtype

GPUs compile them, if a compiler is installed, in some seconds at the start and in the first step. Elsewhere it does not
pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog
import torch

_BANNED = -1e30  # not -inf: 0 * -inf would make the entropy NaN

log = structlog.get_logger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How logits are computed beyond the projection itself."""

    scale: float = 1.0  # scale and cap come from the model
    soft_cap: float | None = None
    temperature: float = 1.0
    end_ids: tuple[int, ...] = ()  # tokens that may not be sampled while a response is shorter than min_tokens
    compute_dtype: torch.dtype = torch.float32  # of the projection; later operations use at least fp32
    chunk_elements: int | None = None  # None: by the device

    def plain(self) -> Head:
        """The bare model's head: fp32 throughout, temperature 1, nothing banned."""
        return Head(scale=self.scale, soft_cap=self.soft_cap)


class Chunk(NamedTuple):
    """Some tokens' projections. `bias` has their dtype, `compute_dtype`."""

    projected: torch.Tensor  # [t, V]
    bias: torch.Tensor | None  # [V]
    targets: torch.Tensor  # [t]
    early: torch.Tensor  # [t] bool: end tokens are banned here


class Reduced(NamedTuple):
    logp: torch.Tensor  # [t] of the target
    entropy: torch.Tensor  # [t]
    total: torch.Tensor  # [t] logsumexp


class Upstream(NamedTuple):
    """What the gradient of the logits is made of."""

    total: torch.Tensor  # [t] logsumexp
    of_logp: torch.Tensor  # [t]
    entropy: torch.Tensor | None  # [t] None: it carries no gradient
    of_entropy: torch.Tensor | None  # [t]


class Passes(Protocol):
    def reduce(self, chunk: Chunk, head: Head) -> Reduced: ...

    def gradient(self, chunk: Chunk, upstream: Upstream, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of the projections, in their dtype, and that of the bias, if there is one.

        d logp_t / d logits_t = one-hot of the target - p, d entropy_t / d logits_t = -p (log p + entropy_t), with p the
        softmax of the logits; then through temperature, cap and scale.
        """
        ...


def passes_on(device: torch.device) -> Passes:
    if device.type != "cuda":
        return InPlace()
    return compiled() or InPlace()


class InPlace:
    """Plain operations on one fp32 copy, or two."""

    def reduce(self, chunk: Chunk, head: Head) -> Reduced:
        logits = sampled_from(wide_logits(chunk.projected, chunk.bias, head), chunk.targets, chunk.early, head)
        # Few passes over [t, V], and no third one in memory: `logsumexp` would compute another exponential.
        peak = logits.amax(dim=-1)
        logits -= peak[:, None]
        weights = logits.exp()
        mass = weights.sum(dim=-1)
        log_mass = mass.log()
        return Reduced(
            logp=logits.gather(1, chunk.targets[:, None])[:, 0] - log_mass,
            entropy=log_mass - torch.bmm(weights[:, None], logits[:, :, None])[:, 0, 0] / mass,
            total=peak + log_mass,
        )

    def gradient(self, chunk: Chunk, upstream: Upstream, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = wide_logits(chunk.projected, chunk.bias, head)
        # d cap tanh(z / cap) / dz = 1 - tanh^2
        slope = None if head.soft_cap is None else 1 - (logits / head.soft_cap).square_()
        logits = sampled_from(logits, chunk.targets, chunk.early, head)
        logits -= upstream.total[:, None]
        scale = upstream.of_logp[:, None] / head.temperature * head.scale
        of_p = -scale
        if upstream.entropy is not None and upstream.of_entropy is not None:  # the one case that holds a third [t, V]
            weight = upstream.of_entropy[:, None] / head.temperature * head.scale
            of_p = of_p - (logits + upstream.entropy[:, None]) * weight
        wide = logits.exp_().mul_(of_p).scatter_add_(1, chunk.targets[:, None], scale)
        if slope is not None:
            wide *= slope
        return wide.to(chunk.projected.dtype), None if chunk.bias is None else wide.sum(0)


class Functions:
    """The same reductions as two functions that torch.compile fuses into few kernels.

    `compiler`: torch.compile, or the identity.
    """

    def __init__(self, compiler: Callable[..., Any] = lambda function: function) -> None:
        self._reduce, self._gradient = compiler(_reduced), compiler(_gradient)

    def reduce(self, chunk: Chunk, head: Head) -> Reduced:
        return Reduced(*self._reduce(chunk, head))

    def gradient(self, chunk: Chunk, upstream: Upstream, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor | None] = self._gradient(chunk, upstream, head)
        return found


class OrInPlace:
    """Runs `passes`; once they raise `failure` (they cannot be compiled), runs `InPlace` for good."""

    def __init__(self, passes: Passes, failure: type[Exception]) -> None:
        self._passes, self._failure = passes, failure

    def reduce(self, chunk: Chunk, head: Head) -> Reduced:
        return self._try(lambda passes: passes.reduce(chunk, head))

    def gradient(self, chunk: Chunk, upstream: Upstream, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._try(lambda passes: passes.gradient(chunk, upstream, head))

    def _try(self, call: Callable[[Passes], _Found]) -> _Found:
        try:
            return call(self._passes)
        except self._failure as error:
            _warn_of_slowness(error)
            self._passes = InPlace()
            return call(self._passes)


def _reduced(chunk: Chunk, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, _ = _logits_and_slope(chunk, head)
    peak = logits.amax(dim=-1, keepdim=True)
    logits = logits - peak
    weights = logits.exp()
    mass, moment = weights.sum(dim=-1), (weights * logits).sum(dim=-1)
    log_mass = mass.log()
    logp = logits.gather(1, chunk.targets[:, None])[:, 0] - log_mass
    return logp, log_mass - moment / mass, peak[:, 0] + log_mass


def _gradient(chunk: Chunk, upstream: Upstream, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits, slope = _logits_and_slope(chunk, head)
    logp = logits - upstream.total[:, None]
    ratio = head.scale / head.temperature
    own = (upstream.of_logp * ratio)[:, None]
    of_p = -own
    if upstream.entropy is not None and upstream.of_entropy is not None:
        of_p = of_p - (logp + upstream.entropy[:, None]) * (upstream.of_entropy * ratio)[:, None]
    wide = logp.exp() * of_p + torch.where(_columns(logits) == chunk.targets[:, None], own, 0.0)
    if slope is not None:
        wide = wide * slope
    return wide.to(chunk.projected.dtype), None if chunk.bias is None else wide.sum(0)


def _logits_and_slope(chunk: Chunk, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits that are sampled from, and the slope of their cap."""
    logits, slope = chunk.projected.to(_wide(chunk.projected)), None
    if chunk.bias is not None:
        logits = logits + chunk.bias
    logits = logits * head.scale
    if head.soft_cap is not None:
        bent = torch.tanh(logits / head.soft_cap)
        logits, slope = bent * head.soft_cap, 1 - bent * bent
    logits = logits / head.temperature
    for end in head.end_ids:
        banned = chunk.early[:, None] & (_columns(logits) == end) & (chunk.targets[:, None] != end)
        logits = torch.where(banned, _BANNED, logits)
    return logits, slope


def _columns(logits: torch.Tensor) -> torch.Tensor:  # [1, V]
    return torch.arange(logits.shape[1], device=logits.device)[None]


@cache
def compiled() -> Passes | None:
    """None if nothing can be compiled here: the reason is logged, and the passes are those in place."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device="cuda"))
    except (RuntimeError, ImportError, OSError) as error:  # no C compiler, no Triton, no place for what is compiled
        _warn_of_slowness(error)
        return None
    from torch._dynamo.exc import TorchDynamoException  # takes a second, and torch.compile has imported it

    return OrInPlace(Functions(torch.compile), TorchDynamoException)


def _warn_of_slowness(error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    log.warning("log-probs are slower than they could be: torch wants a C compiler and Triton", reason=reason)


def wide_logits(projected: torch.Tensor, bias: torch.Tensor | None, head: Head) -> torch.Tensor:
    """[t, V] the model's logits from their projection, at least fp32; in place if it already is."""
    logits = projected.to(_wide(projected))
    if bias is not None:
        logits += bias
    if head.scale != 1:
        logits *= head.scale
    if head.soft_cap is not None:
        logits = logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits


def sampled_from(logits: torch.Tensor, targets: torch.Tensor, early: torch.Tensor, head: Head) -> torch.Tensor:
    """Apply temperature and bans as the engine does before sampling; in place."""
    if head.temperature != 1:
        logits /= head.temperature
    for end in head.end_ids:  # one by one: a list of them would be copied to a GPU, which waits for all before it
        # A response that ended early anyway (another engine, another end token) keeps a finite log-prob.
        logits[:, end] = logits[:, end].masked_fill(early & (targets != end), _BANNED)
    return logits


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
