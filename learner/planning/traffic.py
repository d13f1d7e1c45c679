"""Bytes that a rank sends per token under a layout: over links within its host, and to other hosts.

A rank's own tokens are its part of a micro-batch, whose tokens the ranks of a context group divide. Ranks that share
layers all have the same tokens; each of them counts as having its share. Per token:

    weights     2 each, gathered for both passes, and 4 for the gradient of each trained one; per micro-batch, so the
                fewer of its tokens a rank has, the more per token. Of divided experts and shared layers, only this
                rank's part
    replicas    8 for each trained weight of a shard: its gradients go to the other replicas and come back, counted as
                if a pass had one micro-batch
    context     queries, keys, values and attention's output, in each pass through a layer
    experts     hidden states, there and back, for each expert of a token, in each pass through a layer
    tensor      hidden states, twice in each pass through a layer, where partial sums go to all of the group and come
                back; and per micro-batch the rows of weights that are exchanged for columns

A recomputed forward pass counts again. This is arithmetic only, never timed on GPUs: that a layout that sends less is
faster is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config import schema
from streamrl.learner.parallel.context import idle, repeats
from streamrl.learner.planning.memory import computes_again
from streamrl.learner.planning.sizes import Sizes

FARTHER = 9  # 450 GB/s per GPU within a host, 50 GB/s between hosts: the makers' figures for H100


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes, or shares of something."""

    near: float = 0.0  # within a host
    far: float = 0.0  # to other hosts

    @property
    def weighed(self) -> float:
        return self.near + FARTHER * self.far

    def __add__(self, other: Links) -> Links:
        return Links(near=self.near + other.near, far=self.far + other.far)

    def __mul__(self, times: float) -> Links:
        return Links(near=self.near * times, far=self.far * times)


def sent(
    layout: schema.Layout, sizes: Sizes, config: schema.Config, *, ranks: int, per_host: int, tokens: int
) -> Links:
    """Bytes that a rank sends per token of its own. `tokens`: per micro-batch."""
    shards, passes = ranks // layout.replicas, 3 if computes_again(config) else 2

    def over(size: int, apart: int = 1) -> Links:
        return _over(size, apart, per_host)

    weights = _weights(layout, sizes, shards, per_host) + over(layout.replicas, shards) * (8 * sizes.trained / shards)
    exchanged = passes * 2 * sizes.shared.of_rows / layout.tensor
    by_batch = weights + over(layout.tensor) * exchanged
    of_own = sizes.divided(layout.tensor)
    heads = 4 * of_own.queries + 4 * of_own.keys * repeats(of_own.heads, of_own.kv_heads, layout.context)
    filled = 1 - idle(of_own.heads, layout.context)
    by_token = over(layout.context, layout.tensor) * (heads * layout.tensor / filled)
    by_token += over(layout.tensor) * (2 * 2 * 2 * sizes.width * layout.tensor)
    if (experts := sizes.experts) is not None:
        by_token += over(layout.experts) * (4 * experts.chosen * sizes.width)
    return by_batch * (layout.context * layout.tensor / tokens) + by_token * (passes * sizes.layers)


def _weights(layout: schema.Layout, sizes: Sizes, shards: int, per_host: int) -> Links:
    """Bytes per micro-batch: weights gathered twice, and gradients of the trained ones."""
    experts, shared = sizes.experts, sizes.shared
    of_experts, of_layers = (0 if experts is None else 4 * (experts.total + experts.trained)), 0
    if layout.tensor > 1:
        of_layers = 4 * (shared.weights + shared.trained)
    others = 4 * (2 * sizes.trained + sizes.frozen) - of_experts - of_layers
    parts = ((others, 1), (of_experts, layout.experts), (of_layers, layout.tensor))
    return sum((_over(shards // n, n, per_host) * (part / n) for part, n in parts), Links())


def _over(size: int, apart: int, per_host: int) -> Links:
    """The shares that a rank gets from the others of a group. `apart`: the distance between its ranks."""
    here = min(size, max(1, per_host // apart))
    return Links(near=(here - 1) / size, far=(size - here) / size)
