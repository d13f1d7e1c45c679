"""A pretrained model behind vLLM's own server judges: whatever it thinks, a verdict is one of those that were offered.
With the packages that only `.ci/setup demo` installs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from streamrl.demos.pretrained import converter, find_gguf, make_model
from streamrl.errors import RewardError
from tests.judging_world import judge_of, judge_of_groups
from tests.served import Served
from tests.tiny_rewards import make_item

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SUMS = [(f"What is {a} + {b}?", str(a + b)) for a in range(3, 7) for b in range(4, 8)]
RUBRIC = "The answer is the right sum, and nothing else."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, as clients are told it; the model is called `judge`."""
    folder = tmp_path_factory.mktemp("judge")
    model = make_model(find_gguf(), folder, converter(folder / "logs", print))
    options = ("--name", "judge", "--max-model-len", "1024", "--enforce-eager")
    with Served(model, logs=folder, options=options) as server:
        yield f"{server.url}/v1"


def judges(url: str) -> dict[str, Any]:
    return {"small": {"url": url, "model": "judge"}}


async def test_every_score_is_a_verdict_of_the_scale(served: str, record_property: Any) -> None:
    reward = judge_of(judges=judges(served), rubric=RUBRIC, scale=(0, 4), show=["answer"], timeout_s=60.0)
    asked = [(question, said, right) for question, right in SUMS for said in (right, "I like trains.")]
    scoring = (reward.score(make_item(said, prompt=question, answer=right)) for question, said, right in asked)
    scores = await asyncio.gather(*scoring)
    state = reward.health()
    await reward.close()
    assert set(scores) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert state.state == "well"
    assert state.num_tokens is not None
    assert state.num_tokens > 50 * len(asked)
    right, wrong = scores[::2], scores[1::2]
    record_property("mean_of_right", sum(right) / len(right))
    record_property("mean_of_wrong", sum(wrong) / len(wrong))
    print(f"right {sum(right) / len(right):.2f}, wrong {sum(wrong) / len(wrong):.2f}, {state.num_tokens} tokens")


async def test_of_a_group_each_gets_a_share_and_all_shares_make_half(served: str) -> None:
    reward = judge_of_groups(judges=judges(served), rubric=RUBRIC, opponents=2, timeout_s=60.0)
    for question, right in SUMS[:3]:
        said = [right, "I like trains.", f"It is {right}.", "99"]
        scores = await reward.score_group([make_item(one, prompt=question) for one in said])
        assert sum(float(score) for score in scores if not isinstance(score, RewardError)) == pytest.approx(2.0)
    await reward.close()


async def test_reasons_that_are_cut_off_are_no_verdict_and_the_error_says_what_to_do(served: str) -> None:
    reward = judge_of(judges=judges(served), rubric=RUBRIC, explain=True, max_tokens=4, attempts=2, timeout_s=60.0)
    with pytest.raises(RewardError, match="cut off before a verdict: raise the source's max_tokens"):
        await reward.score(make_item("7", prompt="What is 3 + 4?"))
    await reward.close()


async def test_a_model_that_is_not_served_is_an_outage_that_names_it(served: str) -> None:
    reward = judge_of(judges={"small": {"url": served, "model": "another"}}, outage_s=1.0)
    with pytest.raises(RewardError, match=r"answered 404: .*another"):
        await reward.score(make_item("7"))
    await reward.close()
