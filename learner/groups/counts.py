"""Groups that ended, by the length of their longest response: does dropping hit the long ones?

It does, as a rule: what takes long is old when it comes, and one slow sample makes the group. So every drop of a group
whose lengths are known is counted by them, beside all that ended, and the rate is shown for each length.

Groups that ended, by the dataset that their prompt came from, where `data.train` mixes several.

What is trained of each need not be what the weights say: groups of prompts that are always solved, or never, are
dropped. So both are counted, and the rewards of each are shown beside the mean over all.

For the same reason the rewards of trained groups alone say little of how good the model is: of prompts that it always
solves none is among them. So the mean is told of all that ended while a step was made, too, dropped or trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from streamrl.learner.groups.ledger import DROPPED, TRAINED
from streamrl.protocol.wire.group import GroupHeader

ALL_REWARDS = "all_rollouts/rewards"
NOT_OURS = (f"{DROPPED}malformed", f"{DROPPED}wrong_model")  # what they say of rewards is nothing to this run
_PARTS = (8, 4, 2, 1)  # buckets end at these parts of the longest response there may be


class Lengths:
    def __init__(self, max_tokens: int, known: Mapping[int, tuple[int, int]]) -> None:
        self._bounds = sorted({-(-max_tokens // part) for part in _PARTS})
        self._known = dict(known)

    def count(self, header: GroupHeader, *, dropped: bool) -> None:
        at = bisect_left(self._bounds, max(header.sample_lengths, default=0))
        bound = self._bounds[min(at, len(self._bounds) - 1)]
        num_ended, num_dropped = self._known.get(bound, (0, 0))
        self._known[bound] = (num_ended + 1, num_dropped + dropped)

    def known(self) -> dict[int, tuple[int, int]]:
        """By the upper bound of the length in tokens: groups that ended, and of them those dropped."""
        return dict(sorted(self._known.items()))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for bound, (ended, dropped) in self.known().items():
            found[f"stream/dropped_by_length/{bound}"] = float(dropped)
            found[f"stream/drop_rate_by_length/{bound}"] = dropped / ended
        return found


class Datasets:
    """Counts groups only where there are several; rewards always, those of all prompts together first."""

    def __init__(self, dataset_of: Callable[[int], str], known: Mapping[str, tuple[int, int]]) -> None:
        """`dataset_of`: by the number of a ticket; empty where there is only one."""
        self._dataset_of = dataset_of
        self._known = dict(known)
        self._step = -1
        self._rewards: dict[str, tuple[float, int]] = {}  # by metric: sum and number of that step's

    def count(self, header: GroupHeader, *, outcome: str, step: int) -> None:
        name, trained = self._dataset_of(header.ticket), outcome == TRAINED
        if name:
            num_trained, num_dropped = self._known.get(name, (0, 0))
            self._known[name] = (num_trained + trained, num_dropped + (not trained))
        if outcome in NOT_OURS:
            return
        if step != self._step:
            self._step, self._rewards = step, {}
        self._add(ALL_REWARDS, header)
        if name:
            self._add(f"{ALL_REWARDS}_by_dataset/{name}", header)
        if name and trained:
            self._add(f"train_rollouts/rewards_by_dataset/{name}", header)

    def known(self) -> dict[str, tuple[int, int]]:
        """By name: groups trained and groups dropped."""
        return dict(sorted(self._known.items()))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, (trained, dropped) in self.known().items():
            found[f"stream/trained_by_dataset/{name}"] = float(trained)
            found[f"stream/dropped_by_dataset/{name}"] = float(dropped)
        return found | {metric: total / count for metric, (total, count) in self._rewards.items()}

    def _add(self, metric: str, header: GroupHeader) -> None:
        total, count = self._rewards.get(metric, (0.0, 0))
        self._rewards[metric] = (total + sum(header.sample_rewards), count + len(header.sample_rewards))
