"""Which samples need the score of which reward source. Those of weight 0 are only logged, so that a sample which lacks
one does not fail, unless code of the user's may read it, or a validation goes by it."""

from __future__ import annotations

from streamrl.config.schema import Config, FunctionReward
from streamrl.protocol.wire.ticket import PURPOSES, Purpose
from streamrl.recipe.own import is_own

OF_SOURCE = "val_rollouts/rewards/"


def needed_for(config: Config) -> dict[str, frozenset[Purpose]]:
    """Return for each source the purposes of the tickets whose samples fail without its score."""
    return {name: _needed_for(config, name) for name in config.rewards}


def _needed_for(config: Config, name: str) -> frozenset[Purpose]:
    source = config.rewards[name]
    others = [one for other, one in config.rewards.items() if other != name]
    is_read = not source.of_group and any(isinstance(one, FunctionReward) and one.of_group for one in others)
    if source.weight or is_read or is_own(config.algorithm.advantages):
        return frozenset(PURPOSES)
    is_judge = name == config.validation.pass_by or config.checkpoint.best_by == OF_SOURCE + name
    return frozenset({"eval"}) if is_judge else frozenset()
