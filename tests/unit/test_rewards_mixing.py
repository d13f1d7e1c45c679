"""Mixing of reward sources, and what the configuration may and may not make of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.ticket import Purpose
from streamrl.versions import make_version
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rewards.base import GroupReward, Reward, RewardDouble, ScoreItem
from streamrl.workers.rewards.build import build_rewards
from streamrl.workers.rewards.mixing import Rewards, Scores, Weighted
from streamrl.workers.rollout.answer import Answerer
from tests.helpers import make_ticket
from tests.tiny_rewards import make_item
from tests.worker_world import worker_config


def rewards_of(**values: float) -> Rewards:
    return Rewards({name: Weighted(reward=RewardDouble(lambda _, v=v: v), weight=0.5) for name, v in values.items()})


async def test_the_total_is_the_weighted_sum_and_each_source_stays_visible() -> None:
    rewards = Rewards(
        {
            "exact": Weighted(reward=RewardDouble(lambda item: float(item.completion == "42")), weight=2.0),
            "length": Weighted(reward=RewardDouble(lambda item: -float(len(item.token_ids))), weight=0.25),
        }
    )
    assert await rewards.score(make_item("42")) == Scores(rewards={"exact": 1.0, "length": -2.0}, total=1.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_source_that_gives_no_finite_number_fails_the_sample_and_is_named(value: float) -> None:
    with pytest.raises(RewardError, match=r"reward 'bad': gave"):
        await rewards_of(good=1.0, bad=value).score(make_item())


async def test_a_score_beyond_its_limit_is_nonsense_and_fails_the_sample() -> None:
    rewards = Rewards({"model": Weighted(reward=RewardDouble(lambda _: -1e30), weight=1.0, max_abs=1e6)})
    with pytest.raises(RewardError, match=r"reward 'model': gave -1e\+30, beyond its max_abs of 1e\+06"):
        await rewards.score(make_item())


async def test_a_sample_that_fails_since_no_source_applies_to_it_is_trouble() -> None:
    rewards = Rewards({"math": Weighted(reward=RewardDouble(lambda _: None), weight=1.0)})
    with pytest.raises(RewardError, match="no reward applies to this sample: math returned None for it"):
        await rewards.score(make_item())
    assert rewards.trouble().startswith("the last score failed: no reward applies")


async def test_an_outage_of_one_source_is_an_outage_and_named() -> None:
    sources = {"one": RewardDouble(), "two": RewardDouble()}
    rewards = Rewards({name: Weighted(reward=source, weight=1.0) for name, source in sources.items()})
    assert rewards.outage() is None
    sources["two"].outage = "refused"
    assert rewards.outage() == "reward 'two': refused"


async def test_each_source_tells_how_it_does() -> None:
    def judge(item: ScoreItem) -> float:
        if item.completion == "bad":
            raise RewardError("no")
        return 1.0

    rewards = Rewards({"model": Weighted(reward=RewardDouble(judge), weight=1.0)})
    await asyncio.gather(*(rewards.score(make_item(text)) for text in ("good", "bad", "good")), return_exceptions=True)
    facts = rewards.facts()
    assert (facts["rewards/model/scored"], facts["rewards/model/failed"]) == (2, 1)
    assert facts["rewards/model/state"] == "well"
    assert 0 <= float(facts["rewards/model/latency_s"]) < 1


async def test_finite_values_whose_sum_is_not_finite_fail_the_sample() -> None:
    rewards = Rewards({name: Weighted(reward=RewardDouble(lambda _: 1e308), weight=1.0) for name in ("one", "two")})
    with pytest.raises(RewardError, match="not finite"):
        await rewards.score(make_item())


async def test_an_error_of_one_source_names_it() -> None:
    def fail(item: object) -> float:
        raise RewardError("the server is on fire")

    rewards = Rewards({"model": Weighted(reward=RewardDouble(fail), weight=1.0)})
    with pytest.raises(RewardError, match="reward 'model': the server is on fire"):
        await rewards.score(make_item())


async def test_an_outage_of_one_source_stays_one_for_the_sample() -> None:
    def fail(item: object) -> float:
        raise RewardOutage("nobody is there")

    rewards = Rewards({"model": Weighted(reward=RewardDouble(fail), weight=1.0)})
    with pytest.raises(RewardOutage, match="reward 'model': nobody is there"):
        await rewards.score(make_item())


def beside_logged(source: Reward | GroupReward, *needed_for: Purpose) -> Rewards:
    """A source that gives 1, beside one that is needed for these tickets only."""
    needed = Weighted(reward=RewardDouble(), weight=1.0)
    return Rewards({"right": needed, "logged": Weighted(reward=source, weight=0.0, needed_for=needed_for)})


def refuse(item: ScoreItem) -> float:
    raise RewardError("no words for this")


class RefusingGroup(RewardDouble):
    async def score_group(self, items: Sequence[ScoreItem]) -> list[float | RewardError | None]:
        return [RewardError("not this"), *[0.5] * (len(items) - 1)]


async def test_a_source_that_is_only_logged_fails_no_sample_and_its_failures_are_counted() -> None:
    rewards = beside_logged(RewardDouble(refuse))
    assert await rewards.score(make_item()) == Scores(rewards={"right": 1.0}, total=1.0)
    assert rewards.facts()["rewards/logged/failed"] == 1
    assert rewards.trouble() == ""


async def test_of_a_group_that_is_compared_only_for_the_log_who_fails_has_no_score() -> None:
    rewards, items = beside_logged(RefusingGroup()), [make_item(), make_item()]
    mixed = await rewards.mix(items, [await rewards.score_sample(item) for item in items])
    assert mixed == [
        Scores(rewards={"right": 1.0}, total=1.0),
        Scores(rewards={"right": 1.0, "logged": 0.5}, total=1.0),
    ]
    assert rewards.facts()["rewards/logged/failed"] == 1


async def test_nobody_waits_for_a_source_that_is_only_logged_and_out() -> None:
    source = RewardDouble()
    source.held = asyncio.Event()
    rewards = beside_logged(source)
    scoring = asyncio.create_task(rewards.score(make_item()))
    await asyncio.wait([scoring], timeout=0.05)
    assert not scoring.done(), "it is awaited as long as it may answer"
    source.outage = "refused"
    assert await asyncio.wait_for(scoring, 30) == Scores(rewards={"right": 1.0}, total=1.0)
    assert rewards.outage() is None
    assert rewards.facts()["rewards/logged/state"] == "well"
    assert rewards.facts()["rewards/logged/failed"] == 1


async def test_a_source_of_weight_0_that_a_validation_goes_by_is_needed_for_it() -> None:
    source = RewardDouble(refuse)
    rewards = beside_logged(source, "eval")
    with pytest.raises(RewardError, match="reward 'logged': no words for this"):
        await rewards.score_sample(make_item(), "eval")
    source.outage = "refused"
    assert rewards.outage() == "reward 'logged': refused"


async def test_a_sample_that_only_logged_sources_score_fails_where_they_fail() -> None:
    rewards = Rewards({"logged": Weighted(reward=RewardDouble(refuse), weight=0.0, needed_for=())})
    with pytest.raises(RewardError, match="logged returned None for it, or failed and are only logged"):
        await rewards.score(make_item())


@pytest.mark.parametrize(("purpose", "fails"), [("train", False), ("eval", True)])
async def test_a_group_is_delivered_without_the_scores_that_it_does_not_need(purpose: Purpose, fails: bool) -> None:
    rewards = beside_logged(RewardDouble(refuse), "eval")
    answerer = Answerer(rewards=rewards, config=worker_config(), worker="w", fingerprint="model")
    engine = EngineDouble()
    engine.loads.append((Path("weights"), make_version(1, 1), 1))
    group = await answerer.answer(make_ticket(1, num_samples=2, purpose=purpose), engine)
    header, body = encode_group(group)
    samples = decode_body(decode_header(header), body).samples
    assert [(dict(sample.rewards), sample.reward) for sample in samples] == (
        [] if fails else [({"right": 1.0}, 1.0)] * 2
    )


async def test_closing_closes_every_source() -> None:
    sources = [RewardDouble(), RewardDouble()]
    await Rewards({str(i): Weighted(reward=s, weight=1.0) for i, s in enumerate(sources)}).close()
    assert all(source.closed for source in sources)


def build(permissions: Permissions | None = None, **source: object) -> Rewards:
    kind = schema.FunctionReward if source["type"] == "function" else schema.HttpReward
    return build_rewards({"mine": kind.model_validate(source)}, permissions or Permissions(), None)


def test_code_that_this_worker_was_not_told_of_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.target.*--allow-reward-code json:loads"):
        build(type="function", target="json:loads")


def test_permission_for_a_file_is_for_the_file_and_not_for_its_spelling() -> None:
    build(Permissions(reward_code=("./folder/../rewards.py:f",)), type="function", target="rewards.py:f")
    with pytest.raises(ConfigError, match="may not run"):
        build(Permissions(reward_code=("rewards.py:f",)), type="function", target="rewards.py:g")


def test_a_target_of_no_known_form_lists_the_forms() -> None:
    with pytest.raises(ConfigError, match=r"neither built in \(exact_match, .*\) nor `package.module:function`"):
        build(type="function", target="exactmatch")


@pytest.mark.parametrize("url", ["ftp://host:1", "host:5555", "http://", "http://user:word@host", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.url: .* is not the address of a service"):
        build(Permissions(hosts=("host",)), type="http", url=url)


def test_a_host_that_this_worker_was_not_told_of_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--allow-host evil\.example"):
        build(Permissions(hosts=("good.example", "evil.example:99")), type="http", url="http://evil.example:80")


async def test_a_permitted_host_may_be_given_with_or_without_its_port() -> None:
    for host in ("rewards.example", "rewards.example:80", "Rewards.Example"):
        await build(Permissions(hosts=(host,)), type="http", url="http://rewards.example:80").close()


def test_who_is_not_told_where_the_local_server_is_learns_how_to_be() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.url.*--local-reward-url URL"):
        build(type="http", url="local")
