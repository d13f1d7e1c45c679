"""Metrics that are means over the samples of a step, or over its groups: by name, what each of them adds.

A line here, and the name with its meaning in `streamrl.telemetry.metrics`, is a metric: `tally` adds it up over all
ranks. What is not finite is left out of the step's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from streamrl.protocol.wire.group import Group, Sample

OF_SAMPLES: Final[Mapping[str, Callable[[Group, Sample], float]]] = {
    "train_rollouts/rewards": lambda group, sample: sample.reward,
    "train_rollouts/prompt_lengths": lambda group, sample: len(group.prompt_ids),
    "train_rollouts/response_lengths": lambda group, sample: len(sample.token_ids),
    "train_rollouts/generation_length": lambda group, sample: len(group.prompt_ids) + len(sample.token_ids),
    "train_rollouts/fraction_of_samples_properly_ended": lambda group, sample: sample.finish_reason == "stop",
}

OF_GROUPS: Final[Mapping[str, Callable[[Group], float]]] = {
    "train_rollouts/zero_variance_groups": lambda group: len(set(group.header.sample_rewards)) == 1,
    "timers/generate": lambda group: group.header.generate_s,
    "timers/reward": lambda group: group.header.reward_s,
}
