"""Counts ended groups by the length of their longest response and, if `data.train` mixes several, by dataset.

By length: dropping tends to hit long responses, since slow groups are stale when they arrive, and one slow sample
delays its group. So drops are counted per length beside all ended groups, and each length has its drop rate.

By dataset: what is trained of each need not match the weights, since groups of prompts that are always or never solved
are dropped. So both are counted, and rewards are reported per dataset beside the overall mean.

For the same reason the rewards of trained groups alone say little about the model: prompts that it always solves are
not among them. So the mean over all groups that ended during a step, dropped or trained, is reported too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from streamrl.learner.groups.ledger import DROPPED, TRAINED
from streamrl.protocol.wire.group import GroupHeader

ALL_REWARDS = "all_rollouts/rewards"
NOT_OURS = (f"{DROPPED}malformed", f"{DROPPED}wrong_model")  # their rewards are not counted
_PARTS = (8, 4, 2, 1)  # bucket bounds, as divisors of the maximum response length


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
        """Upper bound of the length in tokens -> (groups that ended, groups dropped)."""
        return dict(sorted(self._known.items()))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for bound, (ended, dropped) in self.known().items():
            found[f"stream/dropped_by_length/{bound}"] = float(dropped)
            found[f"stream/drop_rate_by_length/{bound}"] = dropped / ended
        return found


class Datasets:
    """Counts groups per dataset if there are several, and always sums rewards, overall first."""

    def __init__(self, dataset_of: Callable[[int], str], known: Mapping[str, tuple[int, int]]) -> None:
        """`dataset_of` maps a ticket number to its dataset's name, empty if there is only one."""
        self._dataset_of = dataset_of
        self._known = dict(known)
        self._step = -1
        self._rewards: dict[str, tuple[float, int]] = {}  # of the step: metric -> (sum, count)

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
        """Dataset name -> (groups trained, groups dropped)."""
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
