"""Scoring batches of any lengths, and training: with real, tiny transformers models."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.workers.reward_server.model import RewardModel
from streamrl.workers.reward_server.train import SUMMARY_FILE, TrainSettings, read_pairs, read_ratings, train
from tests.tiny_models import CHARACTERS, Architecture, make_model
from tests.tiny_rewards import make_reward_model


def random_texts(count: int) -> list[str]:
    order = random.Random(0)
    return ["".join(order.choices(CHARACTERS, k=order.randint(1, 60))) for _ in range(count)]


def single_scores(folder: Path, rows: list[list[int]]) -> list[float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.item() for row in rows]


def loaded(folder: Path | str, **settings: Any) -> RewardModel:
    return RewardModel.load(schema.RewardServer(model=str(folder), **settings))


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("with_padding", [True, False])
def test_a_batch_of_any_lengths_gives_what_plain_single_scoring_gives(
    tmp_path: Path, architecture: Architecture, with_padding: bool
) -> None:
    model = loaded(make_reward_model(tmp_path / "rm", architecture=architecture, with_padding=with_padding))
    rows = model.encode(random_texts(100))
    assert model.score(rows) == pytest.approx(single_scores(tmp_path / "rm", rows), abs=1e-5)


def test_without_a_padding_token_even_rows_that_end_with_every_token_are_scored(tmp_path: Path) -> None:
    model = loaded(make_reward_model(tmp_path / "rm", with_padding=False))
    rows = [[1, 2, token] if token % 2 else [token] for token in range(model.vocab_size)]
    assert model.score(rows) == pytest.approx(single_scores(tmp_path / "rm", rows), abs=1e-5)


def test_rewards_are_standardised(tmp_path: Path) -> None:
    folder = str(make_reward_model(tmp_path / "rm"))
    rows = [[5, 6, 7], [8]]
    plain = loaded(folder).score(rows)
    scaled = loaded(folder, reward_mean=0.5, reward_std=2.0).score(rows)
    assert scaled == pytest.approx([(reward - 0.5) / 2.0 for reward in plain])


def test_a_model_without_a_reward_head_is_refused_rather_than_given_a_random_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no reward head \(score.weight missing\).*streamrl reward train"):
        loaded(make_model(tmp_path / "lm"))


def test_a_model_with_several_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 3 outputs, but a reward is one number: set attribute_weights"):
        loaded(make_reward_model(tmp_path / "rm", num_labels=3))


def test_several_outputs_become_one_reward_by_their_weights(tmp_path: Path) -> None:
    folder = str(make_reward_model(tmp_path / "rm", num_labels=3))
    rows = [[5, 6, 7], [8], [9, 10]]
    outputs = loaded(folder, attribute_weights=(1.0, 1.0, 1.0)).forward(rows)
    model = loaded(folder, attribute_weights=(0.5, 0.0, -2.0), reward_mean=1.0, reward_std=4.0)
    expected = [(0.5 * a - 2.0 * c - 1.0) / 4.0 for a, _, c in outputs.tolist()]
    assert model.score(rows) == pytest.approx(expected)


def test_weights_that_do_not_fit_the_outputs_are_refused(tmp_path: Path) -> None:
    folder = str(make_reward_model(tmp_path / "rm", num_labels=3))
    with pytest.raises(DataError, match="3 outputs, but attribute_weights has 2 numbers"):
        loaded(folder, attribute_weights=(1.0, 2.0))


@pytest.mark.parametrize("with_padding", [True, False])
def test_average_pool_is_the_mean_of_what_each_prefix_scores(tmp_path: Path, with_padding: bool) -> None:
    folder = make_reward_model(tmp_path / "rm", with_padding=with_padding)
    rows = [[5, 6, 7, 9], [8], [9, 10]]
    # The model is causal: its output at a token is what the row up to there scores.
    expected = [statistics.fmean(single_scores(folder, [row[: end + 1] for end in range(len(row))])) for row in rows]
    averaged = loaded(folder, pool="average").score(rows)
    assert averaged == pytest.approx(expected, abs=1e-5)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_said_to_be_so() -> None:
    with pytest.raises(DataError, match=r"'models/rm/7' is not a folder, and the hub has no tokenizer for it: "):
        loaded("models/rm/7")


@pytest.mark.parametrize("damage", ["no folder", "no tokenizer", "cut weights", "no weights"])
def test_a_model_folder_that_is_not_whole_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "rm"
    if damage != "no folder":
        make_reward_model(folder)
    if damage == "no tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    if damage == "cut weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    if damage == "no weights":
        (folder / "model.safetensors").unlink()
    with pytest.raises(DataError) as caught:
        loaded(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def write_pairs(path: Path, count: int) -> Path:
    """Whoever has more of the letter a is preferred."""
    order = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            good, bad = ("".join(order.choices(letters, k=6)) for letters in ("aab", "abb"))
            if good.count("a") != bad.count("a"):
                chosen, rejected = sorted((good, bad), key=lambda text: -text.count("a"))
                file.write(json.dumps({"prompt": "say a: ", "chosen": chosen, "rejected": rejected}) + "\n")
    return path


def test_training_learns_the_order_and_leaves_a_model_that_transformers_loads(tmp_path: Path) -> None:
    settings = TrainSettings(
        model=str(make_model(tmp_path / "lm", hidden=32)),
        output=tmp_path / "rm",
        epochs=3,
        lr=1e-3,
    )
    said: list[str] = []
    summary = train(read_pairs(write_pairs(tmp_path / "pairs.jsonl", 600)), settings, said.append)
    assert summary.accuracy > 0.9
    assert said[-1].startswith(f"step {summary.steps}/{summary.steps}: loss ")
    assert json.loads((tmp_path / "rm" / SUMMARY_FILE).read_text())["accuracy"] == summary.accuracy
    model = loaded(tmp_path / "rm")
    rows = model.encode(["say a: aaaaaa", "say a: bbbbbb", "say a: a"])
    scores = model.score(rows)
    assert scores[0] > scores[1]
    assert scores == pytest.approx(single_scores(tmp_path / "rm", rows), abs=1e-5)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    pairs, base = write_pairs(tmp_path / "pairs.jsonl", 60), str(make_model(tmp_path / "lm", hidden=32))
    scores = []
    for name in ("one", "two"):
        train(read_pairs(pairs), TrainSettings(model=base, output=tmp_path / name, lr=1e-3), lambda line: None)
        scores.append(loaded(tmp_path / name).score([[5, 6, 7]]))
    assert scores[0] == scores[1]


def test_pairs_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 60)
    num_short = len(pairs.read_text().splitlines())
    with pairs.open("a") as file:
        file.write(json.dumps({"prompt": "a" * 100, "chosen": "a", "rejected": "b"}) + "\n")
    base = str(make_model(tmp_path / "lm", hidden=32))
    settings = TrainSettings(model=base, output=tmp_path / "rm", max_tokens=50)
    summary = train(read_pairs(pairs), settings, lambda line: None)
    assert (summary.num_overlong, summary.num_trained + summary.num_held_out) == (1, num_short)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"prompt": "a", "chosen": "b"}', 'expected {"prompt": text'),
        ('{"prompt": "a", "chosen": "b", "rejected": 1}', 'expected {"prompt": text'),
        ("[]", 'expected {"prompt": text'),
        ('{"prompt": "", "chosen": "", "rejected": "b"}', "an empty text"),
    ],
)
def test_a_line_that_is_no_pair_is_named_by_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"pairs.jsonl:2: {reason}"):
        read_pairs(path)


def test_a_text_may_have_any_line_separator(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    pair = json.dumps({"prompt": text, "chosen": "a", "rejected": "b"}, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"{pair}\n\n{pair}\n", encoding="utf-8")
    assert [each.texts for each in read_pairs(tmp_path / "pairs.jsonl")] == [(f"{text}a", f"{text}b")] * 2


def test_an_empty_file_of_pairs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds 0 preference pairs"):
        read_pairs(tmp_path / "pairs.jsonl")


@pytest.mark.parametrize("num_scores", [1, 2])
def test_regression_learns_ratings_of_one_or_several_numbers(tmp_path: Path, num_scores: int) -> None:
    order = random.Random(0)
    path = tmp_path / "ratings.jsonl"
    with path.open("w") as file:
        for _ in range(400):
            text = "".join(order.choices("ab", k=6))
            scores = [text.count("a") / 6, text.count("b") / 6][:num_scores]
            row = {"prompt": "rate: ", "completion": text, "score": scores if num_scores > 1 else scores[0]}
            file.write(json.dumps(row) + "\n")
    base = str(make_model(tmp_path / "lm", hidden=32))
    settings = TrainSettings(model=base, output=tmp_path / "rm", epochs=4, lr=2e-3)
    summary = train(read_ratings(path), settings, lambda line: None)
    assert summary.num_outputs == num_scores
    weights = (1.0, -1.0) if num_scores == 2 else ()
    model = loaded(tmp_path / "rm", attribute_weights=weights)
    few, many = model.score(model.encode(["rate: bbbbab", "rate: aaaaba"]))
    assert many > few + 0.3


@pytest.mark.parametrize("score", ["null", "[]", "true", '"1"', "NaN", "[1, null]"])
def test_a_rating_that_is_no_number_is_named_by_file_and_line(tmp_path: Path, score: str) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text(f'{{"prompt": "a", "completion": "b", "score": {score}}}\n')
    with pytest.raises(DataError, match=r"ratings.jsonl:1: expected `score` to be a finite number"):
        read_ratings(path)


def test_ratings_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text("".join(f'{{"prompt": "a", "completion": "b", "score": {score}}}\n' for score in ("1", "[1, 2]")))
    with pytest.raises(DataError, match="all ratings must have the same number"):
        read_ratings(path)


def test_training_may_begin_from_a_reward_model_with_another_number_of_outputs(tmp_path: Path) -> None:
    base = str(make_reward_model(tmp_path / "one"))
    rows = [{"prompt": "a", "completion": "b" * n, "score": [n, -n]} for n in range(1, 9)]
    (tmp_path / "ratings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = TrainSettings(model=base, output=tmp_path / "two")
    assert train(read_ratings(tmp_path / "ratings.jsonl"), settings, lambda line: None).num_outputs == 2


def test_examples_of_which_none_is_left_to_train_on_are_refused(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 60)
    settings = TrainSettings(model=str(make_model(tmp_path / "lm", hidden=32)), output=tmp_path / "rm", max_tokens=2)
    with pytest.raises(DataError, match=r"^0 of \d+ examples have texts short enough.*--max-tokens"):
        train(read_pairs(pairs), settings, lambda line: None)
