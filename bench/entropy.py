"""A lower bound on the size of a delta: the entropy in bits of which elements changed, and by how much.

Which: if k of n elements changed, at unknown positions, n * H(k / n) per tensor. By how much: the empirical entropy of
the differences over all tensors. A coder that knew more, such as that small weights change more often, could do better;
`knowing_exponents` is the same bound for a coder that knows each old exponent.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from bench.publishing import State
from streamrl.protocol.weights.format import Bits

_EXPONENTS = 256  # of bf16: sign, 8 exponent bits, 7 mantissa bits


def delta_entropy_bits(new: State, old: State) -> float:
    differences: Counter[int] = Counter()
    bits = 0.0
    for name, state in new.items():
        changed = state != old[name]
        bits += len(state) * float(_binary_entropy(changed.mean()))
        _count(differences, state[changed] - old[name][changed])
    return bits + _entropy(differences)


def knowing_exponents(new: State, old: State) -> float:
    num_elements, num_changed = np.zeros(_EXPONENTS), np.zeros(_EXPONENTS)
    differences: dict[int, Counter[int]] = {}
    for name, state in new.items():
        exponents = (old[name] >> 7) & 0xFF
        changed = state != old[name]
        num_elements += np.bincount(exponents, minlength=_EXPONENTS)
        num_changed += np.bincount(exponents[changed], minlength=_EXPONENTS)
        moved, of = state[changed] - old[name][changed], exponents[changed]
        for exponent in np.unique(of):
            _count(differences.setdefault(int(exponent), Counter()), moved[of == exponent])
    seen = num_elements > 0
    where = float((num_elements[seen] * _binary_entropy(num_changed[seen] / num_elements[seen])).sum())
    return where + sum(_entropy(counts) for counts in differences.values())


def _count(into: Counter[int], values: Bits) -> None:
    found, counts = np.unique(values, return_counts=True)
    into.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def _binary_entropy(p: npt.ArrayLike) -> npt.NDArray[np.float64]:
    share = np.clip(np.asarray(p, dtype=np.float64), 1e-12, 1 - 1e-12)
    return -(share * np.log2(share) + (1 - share) * np.log2(1 - share))


def _entropy(counts: Counter[int]) -> float:
    """Return the bits needed to encode all of them."""
    n = np.array(list(counts.values()), dtype=np.float64)
    return float((n * np.log2(n.sum() / n)).sum())
