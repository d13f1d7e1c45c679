"""Games of textarena, the package itself: as prompts, as an environment in its process, and a run on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.demos.quickstart import write_base_model
from tests.own_packages import call, python_with, two_steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Rollouts of two prompts side by side, in the child process that a worker gives them.
PLAYED = """
import asyncio, json
from streamrl.config import schema
from streamrl.data.dataset import Dataset
from streamrl.data.prompts import read_prompts
from streamrl.permissions import Permissions
from streamrl.workers.environments.own import OwnEnvironment, build_children

def rows(**settings):
    return read_prompts(Dataset(**settings), malformed="error", key="data.train").rows

async def search(environment, row):
    episode = await environment.begin(row.fields)
    low, high, told = 1, 20, []
    while True:
        guess = (low + high) // 2
        answer = await episode.step(f"I say [{guess}].")
        told.append(answer.observation)
        if answer.done:
            await episode.close()
            return [guess, answer.reward, told]
        low, high = (guess + 1, high) if "higher" in answer.observation else (low, guess - 1)

async def slide(environment, row, moves):
    episode = await environment.begin(row.fields)
    return [(await episode.step(move)).observation for move in moves]

async def main():
    settings = schema.Environment(target="textarena", timeout_s=60.0)
    environment = OwnEnvironment(build_children(settings, Permissions()))
    await environment.start()
    try:
        numbers = rows(textarena="GuessTheNumber-v0", size=6, seed=1)
        tiles = rows(textarena="2048-v0", size=2, seed=1)
        found = await asyncio.gather(*(search(environment, row) for row in numbers for _ in range(3)))
        moves = ["[up]", "[left]", "[down]", "[right]"] * 3
        slid = await asyncio.gather(*(slide(environment, row, moves) for row in tiles for _ in range(3)))
        print(json.dumps({"opening": numbers[0].messages[0]["content"], "found": found, "slid": slid}))
    finally:
        await environment.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("textarena==0.7.4")


def test_samples_of_a_prompt_play_the_same_game_and_nobody_takes_anothers_luck(python: Path, tmp_path: Path) -> None:
    played = call(python, tmp_path, "-c", PLAYED)

    assert played.returncode == 0, played.stderr
    told = json.loads(played.stdout.splitlines()[-1])
    assert "guess the number between 1 and 20" in told["opening"]
    searches = told["found"]
    assert all(reward == 1.0 for _, reward, _ in searches), "who heeds what the game says finds the number"
    for prompt in range(6):
        assert len({json.dumps(one) for one in searches[3 * prompt : 3 * prompt + 3]}) == 1
    assert len({number for number, _, _ in searches}) > 1, "seeds make other games"
    first, second = told["slid"][:3], told["slid"][3:]
    assert first[0] == first[1] == first[2], "also where the game draws at each move"
    assert second[0] == second[1] == second[2] != first[0]
    assert "I say" not in "".join(text for _, _, texts in searches for text in texts), "its own words are there already"


@pytest.mark.parametrize(
    ("game", "told"),
    [("GuesTheNumber-v0", "did you mean 'GuessTheNumber-v0'"), ("TicTacToe-v0", "not a single-player game")],
)
def test_a_game_that_is_none_or_needs_others_is_an_error(python: Path, tmp_path: Path, game: str, told: str) -> None:
    written = tmp_path / "tried.yaml"
    written.write_text(
        f"model: {{path: m}}\ndata: {{train: {{textarena: {game}}}}}\nenvironment: {{target: textarena}}\n"
    )
    words = ("-m", "streamrl.ops.cli.main", "reward", "try", "exact_match", "--data", str(written), "--completion", "a")
    tried = call(python, tmp_path, *words)

    assert tried.returncode == 2
    assert told in tried.stderr


def test_a_run_plays_it_and_loses_nothing(python: Path, tmp_path: Path) -> None:
    write_base_model(tmp_path / "base", seed=1, num_positions=2048)
    written = """
data:
  train: {textarena: GuessTheNumber-v0, size: 16, seed: 1, prompt: "{opening} say: "}
  validation: {textarena: GuessTheNumber-v0, size: 2, seed: 2, prompt: "{opening} say: "}
  max_prompt_tokens: 900
environment: {target: textarena, max_turns: 3, max_tokens: 700}
sampling: {num_samples: 2, max_tokens: 6}
training: {groups_per_step: 2}
validation: {max_prompts: 2, sampling: {max_tokens: 6}}
"""

    assert list(two_steps(python, tmp_path, written)["held_out"]) == ["environment"]
