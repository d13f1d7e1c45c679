"""What is learnt from a group: one small file an algorithm, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from learner.algorithms.base import Algorithm
from learner.algorithms.reinforce import Reinforce
from learner.algorithms.rejection_sampling import RejectionSampling
from streamrl.config import schema

ALGORITHMS: Mapping[str, Callable[[schema.Algorithm], Algorithm]] = {
    "reinforce": Reinforce,
    "rejection_sampling": RejectionSampling,
}


def make_algorithm(settings: schema.Algorithm) -> Algorithm:
    return ALGORITHMS[settings.name](settings)
