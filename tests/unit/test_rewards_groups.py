"""Sources that see all samples of a prompt at once, and functions that know why a sample ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError, RewardOutage
from streamrl.ops.cli.main import main
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import GroupReward, RewardDouble, ScoreItem
from streamrl.workers.rewards.build import build_reward
from streamrl.workers.rewards.mixing import Rewards, Scores, Weighted
from tests.judging_world import judges_serving, source_of
from tests.tiny_rewards import make_item
from tests.worker_world import WorkerWorld

CODE = """
def ends(prompt, completion, token_ids, fields, *, truncated, finish_reason="?"):
    return -1.0 if truncated else float(finish_reason == "stop")

def ranks(completions, answer, rewards=None, **kwargs):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [None if answer[i] == "poem" else order.index(i) + rewards[i].get("right", 0.0) for i in range(len(order))]

def of_trl(completions, truncated, finish_reason):
    return [10.0 * cut + (why == "stop") for cut, why in zip(truncated, finish_reason)]

def own_option(prompt, completion, token_ids, fields, *, truncated="mine"):
    return float(truncated == "set")

def short(completions):
    return [1.0]

def raises(completions):
    raise ValueError("no group")

def ours(prompt, completion, token_ids, fields):
    return 1.0
"""


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)


class GroupDouble:
    """Ranks by a plain function, and remembers what it was asked."""

    def __init__(self, judge: Callable[[list[ScoreItem]], list[float | RewardError | None]]) -> None:
        self._judge, self._plain = judge, RewardDouble()
        self.groups: list[list[ScoreItem]] = []
        self.start, self.health, self.close = self._plain.start, self._plain.health, self._plain.close

    async def score_group(self, items: Any) -> list[float | RewardError | None]:
        self.groups.append(list(items))
        return self._judge(list(items))


async def scores(function: str, items: list[ScoreItem], **settings: Any) -> list[Any]:
    target = f"mine.py:{function}"
    source = schema.FunctionReward(type="function", target=target, **settings)
    reward = build_reward("mine", source, Permissions(reward_code=(target,)), None)
    try:
        await reward.start()
        if isinstance(reward, GroupReward):
            return list(await reward.score_group(items))
        return [await reward.score(item) for item in items]
    finally:
        await reward.close()


def cut_off(completion: str = "42") -> ScoreItem:
    return ScoreItem(prompt="", completion=completion, token_ids=np.zeros(2, dtype=np.int32), finish_reason="length")


async def test_a_function_that_has_such_parameters_knows_why_a_sample_ended() -> None:
    assert await scores("ends", [make_item(), cut_off()]) == [1.0, -1.0]
    assert await scores("of_trl", [make_item(), cut_off()]) == [1.0, 10.0]
    assert await scores("own_option", [cut_off()], options={"truncated": "set"}) == [1.0]


async def test_a_function_of_groups_sees_all_samples_with_what_others_gave_them() -> None:
    items = [
        ScoreItem(
            prompt="2+2=",
            completion="x" * length,
            token_ids=np.zeros(length, dtype=np.int32),
            fields={"answer": "4"},
            rewards={"right": 10.0 * length},
        )
        for length in (3, 1, 2)
    ]
    assert await scores("ranks", items, of_group=True) == [32.0, 10.0, 21.0]
    assert await scores("ranks", [make_item(answer="poem")] * 2, of_group=True) == [None, None]


async def test_of_a_wrong_form_or_number_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="of_group needs a function of TRL's form"):
        await scores("ours", [make_item()], of_group=True)
    with pytest.raises(RewardError, match="returned 1 rewards for 2 completions"):
        await scores("short", [make_item()] * 2, of_group=True)
    with pytest.raises(RewardError, match=r"ValueError: no group \(mine.py:"):
        await scores("raises", [make_item()] * 2, of_group=True)


def mix(*items: float, of_group: Any) -> tuple[Rewards, GroupDouble, list[ScoreItem]]:
    double = GroupDouble(of_group)
    alone = RewardDouble(lambda item: float(item.completion))
    rewards = Rewards({"alone": Weighted(reward=alone, weight=2.0), "beside": Weighted(reward=double, weight=0.5)})
    return rewards, double, [make_item(str(value)) for value in items]


async def test_groups_are_scored_behind_the_samples_and_added_by_weight() -> None:
    rewards, double, items = mix(1.0, 2.0, of_group=lambda items: [4.0, None])
    scored = [await rewards.score_sample(item) for item in items]
    assert await rewards.mix(items, scored) == [
        Scores(rewards={"alone": 1.0, "beside": 4.0}, total=4.0),
        Scores(rewards={"alone": 2.0}, total=4.0),
    ]
    assert [dict(item.rewards) for item in double.groups[0]] == [{"alone": 1.0}, {"alone": 2.0}]


async def test_who_fails_in_a_group_fails_alone_and_a_group_that_fails_fails_whole() -> None:
    def one(items: list[ScoreItem]) -> list[float | RewardError | None]:
        return [RewardError("not this"), 1.0]

    def all_of_them(items: list[ScoreItem]) -> list[float | RewardError | None]:
        raise RewardError("none")

    for judge, failed in ((one, [True, False]), (all_of_them, [True, True])):
        rewards, _, items = mix(1.0, 2.0, of_group=judge)
        mixed = await rewards.mix(items, [await rewards.score_sample(item) for item in items])
        assert [isinstance(scores, RewardError) for scores in mixed] == failed
        assert str(mixed[0]).startswith("reward 'beside': no")
        assert rewards.trouble().startswith("the last score failed: reward 'beside'")


async def test_a_worker_has_a_group_compared_when_all_its_samples_are_there() -> None:
    double = GroupDouble(lambda items: [float(i) for i in range(len(items))])
    world = WorkerWorld(source=double)
    for number in range(3):
        world.put(number)
    world.start()
    groups = await world.delivered(3)
    await world.finish()
    assert [[sample.rewards["made_up"] for sample in group.samples] for group in groups] == [[0.0, 1.0]] * 3
    assert [len(items) for items in double.groups] == [2] * 3


async def test_an_outage_of_a_group_source_gives_the_ticket_back() -> None:
    def out(items: list[ScoreItem]) -> list[float | RewardError | None]:
        raise RewardOutage("away")

    world = WorkerWorld(source=GroupDouble(out))
    world.put(1)
    world.start()
    await world.until(lambda: world.tickets.handed_back, "the ticket is handed back")
    await world.finish()
    assert world.rollout.counts.groups_failed == 0


RUN = """
model: {{path: model}}
data: {{train: rows.jsonl}}
validation: {{every_steps: 0}}
rewards:
  ranks: {{type: function, target: mine.py:ranks, of_group: true}}
  judge: {judge}
"""


async def test_a_source_of_a_configuration_is_tried_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    Path("rows.jsonl").write_text(json.dumps({"text": "2+2=", "answer": "4"}) + "\n")
    Path("said.jsonl").write_text(json.dumps(["four", "4"]) + "\n")
    async with judges_serving() as server:
        Path("run.yaml").write_text(RUN.format(judge=source_of(server.url).model_dump_json()))
        words = ["reward", "try", "NAME", "--data", "run.yaml", "--completions", "said.jsonl", "--json"]

        async def tried(name: str) -> list[float]:
            assert await asyncio.to_thread(main, [name if word == "NAME" else word for word in words]) == 0
            return [row["score"] for row in json.loads(capsys.readouterr().out)["rows"]]

        assert await tried("ranks") == [1.0, 0.0]
        judged = await tried("judge")
    assert judged == [(1 + sum(map(ord, said)) % 10 - 1) / 9 for said in ("four", "4")]
