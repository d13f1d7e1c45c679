"""A group function of a run, tried on its own: the run's other sources score the samples first, since it may read their
rewards. Services among them are not asked, which may cost money; `STAND_IN` is read as their reward.

Blocks on the sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamrl.config import schema
from streamrl.errors import RewardError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import GroupReward, ScoreItem, SourceHealth
from streamrl.workers.rewards.functions import build_function_reward
from streamrl.workers.rewards.mixing import STAND_IN, applying, build_rewards


class GroupTrial:
    """`unasked`: the names of the services."""

    def __init__(self, name: str, sources: Mapping[str, schema.Reward], permissions: Permissions) -> None:
        source = sources[name]
        assert isinstance(source, schema.FunctionReward), "only functions read the others' rewards"
        reward = build_function_reward(name, source, permissions)
        assert isinstance(reward, GroupReward), "others are tried on single samples"
        read = {other: one for other, one in sources.items() if not one.of_group}
        self.unasked = tuple(other for other, one in read.items() if isinstance(one, schema.SERVICES))
        asked = {other: one for other, one in read.items() if other not in self.unasked}
        self._reward, self._others = reward, build_rewards(asked, permissions, None)

    async def start(self) -> None:
        await self._reward.start()
        await self._others.start()

    async def score_group(self, items: Sequence[ScoreItem]) -> Sequence[float | RewardError | None]:
        scored = [await self._others.score_sample(item) for item in items]
        assumed = dict.fromkeys(self.unasked, STAND_IN)
        informed = [
            replace(item, rewards=assumed | applying(scores)) for item, scores in zip(items, scored, strict=True)
        ]
        return await self._reward.score_group(informed)

    def health(self) -> SourceHealth:
        return self._reward.health()

    async def close(self) -> None:
        await self._reward.close()
        await self._others.close()
