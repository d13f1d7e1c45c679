"""A line with place, key, value and remedy for each mistake in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config_world import SHIPPED, error_of


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temprature=1", "unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"),
        ("samplng.top_p=1", "unknown key 'samplng'; did you mean 'sampling'?"),
        ("lr=1e-6", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("rewards.exact.wieght=1", "unknown key 'rewards.exact.wieght'; did you mean 'rewards.exact.weight'?"),
        (
            "validation.sampling.topp=1",
            "unknown key 'validation.sampling.topp'; did you mean 'validation.sampling.top_p'?",
        ),
        (
            "qqqq=1",
            "unknown key 'qqqq'; a configuration has name, seed, dir, redis, model, data, sampling, rewards, "
            "environment, reward_server, teacher, algorithm, optimizer, training, lag, weights, checkpoint, "
            "validation, metrics, worker, learner",
        ),
        (
            "sampling.n=4",
            "unknown key 'sampling.n'; sampling has num_samples, max_tokens, min_tokens, greedy, temperature, top_k, "
            "top_p, repetition_penalty, stop, accept_mismatch",
        ),
        ("extends=bse.yaml", "extends = 'bse.yaml': there is no file bse.yaml; did you mean base.yaml?"),
        ("extends=nowhere.yaml", f"extends = 'nowhere.yaml': there is no file nowhere.yaml; {SHIPPED}"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': must be a valid number"),
        ("optimizer.lr='1e-6'", "optimizer.lr = '1e-6': must be a valid number"),
        ("optimizer.lr=1e-6 # slow", "optimizer.lr = '1e-6 # slow': must be a valid number"),
        ("optimizer.betas=[0.9, 0.9] # x", "optimizer.betas = '[0.9, 0.9] # x': must be a list"),
        ("optimizer.lr=.nan", "optimizer.lr = nan: must be a finite number"),
        ("sampling.num_samples=2.5", "sampling.num_samples = 2.5: must be a valid integer"),
        ("sampling.num_samples=2.0", "sampling.num_samples = 2.0: must be a valid integer"),
        ("sampling.num_samples=true", "sampling.num_samples = True: must be a valid integer"),
        ("sampling.num_samples=0", "sampling.num_samples = 0: must be greater than or equal to 1"),
        ("sampling.greedy=yes", "sampling.greedy = 'yes': must be true or false"),
        ("name=2024", "name = 2024: must be text (quote it if it is meant as text)"),
        (
            "name=../x",
            "name = '../x': must be at most 64 letters, digits, '.', '_' and '-', starting with a letter or digit",
        ),
        ("seed=4294967296", "seed = 4294967296: must be less than 4294967296"),
        ("name=", "name = nothing: must be text (quote it if it is meant as text)"),
        ("model.dtype=fp8", "model.dtype = 'fp8': must be 'auto', 'float32', 'bfloat16' or 'float64'"),
        ("training.max_time=5", "training.max_time = 5: must be a duration DD:HH:MM:SS, such as 00:03:50:00"),
        (
            "redis.max_backlog_bytes=4GB",
            "redis.max_backlog_bytes = '4GB': must be a number of bytes, such as 4000000000",
        ),
        ("optimizer=3", "optimizer = 3: must be a map of settings"),
        ("optimizer.betas=0.9", "optimizer.betas = 0.9: must be a list"),
        ("optimizer.betas=[0.9, x]", "optimizer.betas[1] = 'x': must be a valid number"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: must be a longer list; conf/reinforce.yaml shows it"),
        ("optimizer.betas=[]", "optimizer.betas = []: must be a longer list; conf/reinforce.yaml shows it"),
        (
            "algorithm.name=GRPO",
            "algorithm.name = 'GRPO': must be 'reinforce' or 'rejection_sampling'; "
            "the recipe of this name is extends=recipes/grpo.yaml",
        ),
        ("algorithm.name=adam", "algorithm.name = 'adam': must be 'reinforce' or 'rejection_sampling'"),
        (
            "extends=recipes/grp.yaml",
            "extends = 'recipes/grp.yaml': there is no file recipes/grp.yaml; did you mean recipes/grpo.yaml?",
        ),
        ("seed.x=1", "seed = a map: must be a valid integer"),
        ("rewards.exact.type=htp", "rewards.exact.type = 'htp': must be 'function' or 'http' or 'judge' or 'code'"),
        ("rewards.other.url=http", "rewards.other.type = nothing: must be 'function' or 'http' or 'judge' or 'code'"),
        (
            "rewards.other.type=http",
            "rewards.other.url is not set; set it in the file, or with the override rewards.other.url=VALUE",
        ),
        (
            "algorithm.loss_args.x=[1]",
            "algorithm.loss_args.x = [1]: must be text (quote it if it is meant as text) or a valid integer or "
            "a valid number or true or false",
        ),
        ("worker.engine_args.x={y: [1, .inf]}", "worker.engine_args.x = a map: must be a finite number"),
    ],
)
def test_a_wrong_override_is_told_in_one_line(config_folder: Path, override: str, message: str) -> None:
    assert error_of("base.yaml", override) == f"override {override!r}: {message}"


def test_a_key_named_like_the_type_of_its_source_confuses_nobody(config_folder: Path) -> None:
    override = "rewards.other={type: function, function: f}"

    assert error_of("base.yaml", override).splitlines() == [
        f"override '{override}': rewards.other.target is not set; "
        "set it in the file, or with the override rewards.other.target=VALUE",
        f"override '{override}': unknown key 'rewards.other.function'"
        "; `streamrl config show conf/reinforce.yaml` prints all keys",
    ]


DATASETS = "must be a file, {path: FILE}, or several by name: {one: {path: FILE}, other: {path: FILE}}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{}", f"data.train = a map: {DATASETS}"),
        ("[a.jsonl]", f"data.train = ['a.jsonl']: {DATASETS}"),
        ("{math: {path: a, weight: 0}}", "data.train.math.weight = 0: must be greater than 0"),
        ("{math: {path: a, wight: 1}}", "unknown key 'data.train.math.wight'; did you mean 'data.train.math.weight'?"),
        ("{math: a.jsonl}", "data.train.math = 'a.jsonl': must be a map of settings"),
        ("{hub: a/b, splt: x}", "unknown key 'data.train.splt'; did you mean 'data.train.split'?"),
    ],
)
def test_a_mistake_about_datasets_names_the_entry(config_folder: Path, value: str, message: str) -> None:
    override = f"data.train={value}"

    assert error_of("base.yaml", override) == f"override {override!r}: {message}"


def test_a_mistake_in_a_file_is_told_with_its_line(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text("extends: base.yaml\n\nsampling:\n  num_samples: 4\n  temprature: 1\n")

    assert error_of("mine.yaml") == (
        "mine.yaml:5: unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("optimizer.lr: 1e-5", "unknown key 'optimizer.lr'; dots are for command lines: write optimizer: {lr: ...}"),
        (
            "validation: {sampling.max_tokens: 9}",
            "unknown key 'validation.sampling.max_tokens'; "
            "dots are for command lines: write sampling: {max_tokens: ...}",
        ),
        ("optimizer.lrr: 1e-5", "unknown key 'optimizer.lrr'; did you mean 'optimizer'?"),
    ],
)
def test_a_dotted_key_in_a_file_is_told_how_files_write_it(config_folder: Path, text: str, told: str) -> None:
    (config_folder / "mine.yaml").write_text(f"extends: base.yaml\n{text}\n")

    assert error_of("mine.yaml") == f"mine.yaml:2: {told}"


def test_all_mistakes_are_told_at_once_a_line_each(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text("seed: -1\nrewards: {m: {type: http}}\nnme: x\n")

    assert error_of("mine.yaml").splitlines() == [
        "mine.yaml:1: seed = -1: must be greater than or equal to 0",
        "mine.yaml: model.path is not set; set it in the file, or with the override model.path=VALUE",
        "mine.yaml: data.train is not set; set it in the file, or with the override data.train=VALUE",
        "mine.yaml:2: rewards.m.url is not set; set it in the file, or with the override rewards.m.url=VALUE",
        "mine.yaml:3: unknown key 'nme'; did you mean 'name'?",
    ]


def test_what_is_missing_is_told_of_the_file_and_not_of_an_override_beside_it(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text("extends: base.yaml\nmodel: null\n")

    assert error_of("mine.yaml", "seed=2").startswith("mine.yaml: model.path is not set")
    assert error_of("base.yaml", "rewards.exact.target=null", "rewards.exact.weight=2").startswith("override")


def test_a_long_value_is_cut_in_errors(config_folder: Path) -> None:
    message = error_of("base.yaml", f"optimizer.lr={'x' * 500}").rpartition("optimizer.lr = ")[2]

    assert len(message) < 100
