"""Builds a run's reward sources from its configuration, which is data: `Permissions` decides what may really be used.

`GroupTrial` is a group function of a run, tried on its own. Blocks on the sources.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from streamrl.config import schema
from streamrl.errors import RewardError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import PURPOSES, Purpose
from streamrl.workers.rewards.base import GroupReward, Reward, ScoreItem, SourceHealth, Spend
from streamrl.workers.rewards.mixing import Rewards, Weighted, applying

STAND_IN = 1.0  # the reward that a group source reads of a service which a trial does not ask


def build_rewards(
    sources: Mapping[str, schema.Reward],
    permissions: Permissions,
    local_reward_url: str | None,
    spend: Spend | None = None,
    needed_for: Mapping[str, Collection[Purpose]] = MappingProxyType({}),
) -> Rewards:
    """Build the run's sources without starting them; UserError if this worker may not use one. `spend`: for budgets
    shared by workers; None if this process is alone. `needed_for`: see `config.logged`; others are always needed."""
    built = {}
    for name, source in sources.items():
        reward = build_reward(name, source, permissions, local_reward_url, spend)
        patience_s = source.timeout_s + (source.outage_s if isinstance(source, schema.SERVICES) else 0.0)
        built[name] = Weighted(
            reward=reward,
            weight=source.weight,
            max_abs=source.max_abs,
            patience_s=patience_s,
            needed_for=needed_for.get(name, PURPOSES),
        )
    return Rewards(built)


def build_reward(
    name: str,
    source: schema.Reward,
    permissions: Permissions,
    local_reward_url: str | None,
    spend: Spend | None = None,
) -> Reward | GroupReward:
    """Build one source; httpx is imported only if a source needs it."""
    if isinstance(source, schema.FunctionReward):
        from streamrl.workers.rewards.functions import build_function_reward

        return build_function_reward(name, source, permissions)
    if isinstance(source, schema.CodeReward):
        from streamrl.workers.rewards.code import build_code_reward

        return build_code_reward(name, source, permissions)
    if isinstance(source, schema.JudgeReward):
        from streamrl.workers.rewards.judge import build_judge_reward

        return build_judge_reward(name, source, permissions, spend)
    from streamrl.workers.rewards.http_client import build_http_reward

    return build_http_reward(name, source, permissions, local_reward_url)


class GroupTrial:
    """Scores by one group function. The run's other sources score the samples first, since it may read their rewards.
    Services among them are not asked, which may cost money; `STAND_IN` is read as their reward. `unasked`: their names.
    """

    def __init__(self, name: str, sources: Mapping[str, schema.Reward], permissions: Permissions) -> None:
        source = sources[name]
        assert isinstance(source, schema.FunctionReward), "only functions read the others' rewards"
        reward = build_reward(name, source, permissions, None)
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
