"""Router metrics of a step: how evenly experts are used, the entropy of their choice, the size of their logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def of_routers(totals: npt.NDArray[np.float64], num_layers: int) -> dict[str, float]:
    """Means over layers.

    `totals`: per layer the tokens of each expert and the sums of entropy and logsumexp^2; then the number of routed
    tokens.
    """
    num_tokens = totals[-1]
    if num_tokens == 0:
        return {}
    sums = totals[:-1].reshape(num_layers, -1)
    loads, entropy, z = sums[:, :-2], sums[:, -2], sums[:, -1]
    return {
        "router/load_max_over_mean": float((loads.max(1) / loads.mean(1)).mean()),
        "router/unused_experts": float((loads == 0).mean()),
        "router/entropy": float(entropy.mean() / num_tokens),
        "router/z": float(z.mean() / num_tokens),
    }
