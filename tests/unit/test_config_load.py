"""From files and overrides to a configuration, and a line with place, key, value and remedy for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from streamrl.config.load import as_overrides, config_from_json, load_config
from streamrl.config.schema import FunctionReward, HttpReward
from streamrl.errors import ConfigError

BASE = """\
model: {path: base}
data:
  train: x.jsonl
rewards:
  exact: {type: function, target: exact_match}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # so that errors show short paths
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


CONF = Path(__file__).resolve().parents[2] / "conf"
SHIPPED = f"streamrl ships {', '.join(sorted(str(path.relative_to(CONF)) for path in CONF.rglob('*.yaml')))}"


def error_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_file_overrides_what_it_extends_and_the_command_line_overrides_both(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.yaml").write_text(
        "extends: ../base.yaml\nmodel:\n  dtype: float32\noptimizer: {lr: 1e-5}\n"
    )

    loaded = load_config("sub/mine.yaml", ["optimizer.lr=1e-6", "lag.max_steps=0"])

    assert loaded.config.model.path == "base"
    assert loaded.config.model.dtype == "float32"
    assert loaded.config.optimizer.lr == 1e-6
    assert loaded.config.lag.max_steps == 0
    assert loaded.origin("model.path") == "base.yaml:1"
    assert loaded.origin("model.dtype") == "sub/mine.yaml:3"
    assert loaded.origin("optimizer.lr") == "override 'optimizer.lr=1e-6'"
    assert loaded.origin("seed") is None


def test_lists_are_replaced_and_not_merged(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: base.yaml\nsampling: {stop: [a, b]}\n")

    assert load_config("mine.yaml", ["sampling.stop=[c]"]).config.sampling.stop == ("c",)


def test_null_takes_an_inherited_map_away(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "extends: base.yaml\nmodel: {lora: {rank: 8}}\nrewards:\n  exact: null\n  m: {type: http, url: 'http://a:1'}\n"
    )

    config = load_config("mine.yaml", ["model.lora=null"]).config

    assert config.model.lora is None
    assert isinstance(config.rewards["m"], HttpReward)
    assert list(config.rewards) == ["m"]


def test_one_changed_setting_of_validation_sampling_leaves_its_other_defaults(folder: Path) -> None:
    sampling = load_config("base.yaml", ["validation.sampling.max_tokens=7"]).config.validation.sampling

    assert (sampling.max_tokens, sampling.num_samples, sampling.greedy) == (7, 1, True)


def test_extending_in_a_circle_is_refused(folder: Path) -> None:
    (folder / "a.yaml").write_text("extends: b.yaml\n")
    (folder / "b.yaml").write_text("extends: a.yaml\n")

    assert error_of("a.yaml") == "b.yaml:1: extends in a circle: a.yaml -> b.yaml -> a.yaml"


def test_a_missing_base_is_named_with_the_line_that_asks_for_it(folder: Path) -> None:
    (folder / "a.yaml").write_text("name: a\nextends: nowhere.yaml\n")

    assert error_of("a.yaml") == f"a.yaml:2: extends = 'nowhere.yaml': there is no file nowhere.yaml; {SHIPPED}"


def test_a_file_is_not_told_to_extend_itself(folder: Path) -> None:
    (folder / "case.yaml").write_text("extends: ./ase.yaml\n")

    assert error_of("case.yaml").endswith("there is no file ase.yaml; did you mean base.yaml?")


def test_a_list_of_files_is_laid_one_on_another(folder: Path) -> None:
    (folder / "a.yaml").write_text("seed: 1\nlag: {max_steps: 1}\n")
    (folder / "b.yaml").write_text("seed: 2\n")
    (folder / "mine.yaml").write_text("extends: [base.yaml, a.yaml, b.yaml]\ntraining: {max_steps: 3}\n")

    config = load_config("mine.yaml").config

    assert (config.model.path, config.lag.max_steps, config.seed, config.training.max_steps) == ("base", 1, 2, 3)


def test_extends_on_the_command_line_lays_a_file_on_all_before_it(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: base.yaml\nalgorithm: {loss: tis, top_n: 3}\n")

    loaded = load_config(
        "mine.yaml", ["algorithm.loss_mean=token", "extends=recipes/grpo.yaml", "sampling.num_samples=2"]
    )

    assert (loaded.config.algorithm.loss, loaded.config.algorithm.loss_mean) == ("ppo", "sequence")
    assert (loaded.config.algorithm.top_n, loaded.config.sampling.num_samples) == (3, 2)
    assert str(loaded.origin("algorithm.loss")).endswith("recipes/grpo.yaml:11")


@pytest.mark.parametrize("wrong", ["3", "[]", "[base.yaml, 3]", "{a: b}"])
def test_extends_takes_names_of_files(folder: Path, wrong: str) -> None:
    (folder / "a.yaml").write_text(f"extends: {wrong}\n")

    assert error_of("a.yaml").endswith(": must be a file name, or a list of file names")


def test_a_missing_file_is_named_with_the_nearest_one(folder: Path) -> None:
    assert error_of("bse.yaml") == "there is no configuration file bse.yaml; did you mean base.yaml?"
    assert error_of("nowhere/else.yaml") == f"there is no configuration file nowhere/else.yaml; {SHIPPED}"


@pytest.mark.parametrize("name", ["reinforce.yaml", "conf/reinforce.yaml"])
def test_a_shipped_configuration_is_found_by_its_name_from_any_folder(folder: Path, name: str) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "own.yaml").write_text(f"extends: {name}\nseed: 7\n")

    config = load_config("mine/own.yaml").config

    assert config.seed == 7
    assert config == load_config(name, ["seed=7"]).config
    assert load_config("gpu_qwen_7b_lora.yaml").config.model.lora is not None  # by way of two others


def test_an_own_file_wins_over_a_shipped_one_of_its_name(folder: Path) -> None:
    (folder / "reinforce.yaml").write_text(BASE)
    (folder / "own.yaml").write_text("extends: reinforce.yaml\n")

    assert load_config("reinforce.yaml").config.model.path == "base"
    assert load_config("own.yaml").config.model.path == "base"
    assert load_config("conf/reinforce.yaml").config.model.path != "base"


def test_a_shipped_setting_says_the_file_where_it_was_written(folder: Path) -> None:
    (folder / "own.yaml").write_text("extends: reinforce.yaml\nseed: 7\n")
    loaded = load_config("own.yaml")

    assert loaded.origin("seed") == "own.yaml:2"
    assert re.fullmatch(r"/.*/conf/reinforce\.yaml:\d+", loaded.origin("model.path") or "")


def test_a_name_in_another_folder_is_not_a_shipped_one(folder: Path) -> None:
    assert error_of("other/reinforce.yaml").startswith("there is no configuration file other/reinforce.yaml; ")


def test_a_folder_an_empty_file_and_a_list_are_no_configuration(folder: Path) -> None:
    (folder / "empty.yaml").write_text("# nothing\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "bytes.yaml").write_bytes(b"name: \xff\n")

    assert error_of(".") == "cannot read the configuration file .: Is a directory"
    assert error_of("empty.yaml") == "empty.yaml: a configuration must be a map of settings; it is empty"
    assert error_of("list.yaml") == "list.yaml: a configuration must be a map of settings; it holds [1]"
    assert error_of("bytes.yaml") == "bytes.yaml: not UTF-8 text: invalid start byte at byte 6"


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
def test_a_wrong_override_is_told_in_one_line(folder: Path, override: str, message: str) -> None:
    assert error_of("base.yaml", override) == f"override {override!r}: {message}"


def test_arguments_of_the_engine_are_maps_and_lists_too_and_merge_by_key(folder: Path) -> None:
    overrides = [
        "worker.engine_args.compilation_config={mode: 3, cudagraph_capture_sizes: [1, 2]}",
        "worker.engine_args.compilation_config.mode=0",
        "worker.engine_args.speculative_config=null",
    ]
    config = load_config(folder / "base.yaml", overrides).config
    expected = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2]}, "speculative_config": None}
    assert config.worker.engine_args == expected
    assert config_from_json(config.model_dump_json()).worker.engine_args == expected


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("#### ?(-?[\\d,.]+)", "#### ?(-?[\\d,.]+)"),
        ("Prefer answer #1", "Prefer answer #1"),
        ("Prefer: answer #1", "Prefer: answer #1"),
        ("5 # or more", "5 # or more"),
        ("'5' # or more", "'5' # or more"),
        ("---", "---"),
        ("--- a", "--- a"),
        ("|", "|"),
        (">", ">"),
        ("-", "-"),
        ("?", "?"),
        ("one\n  two", "one\n  two"),
        (" a ", "a"),
        ("'#1'", "#1"),
        ('" a "', " a "),
        ("'5'", "5"),
        ("5", 5),
        ("1e3", 1000.0),
        ("true", True),
    ],
)
def test_a_value_on_the_command_line_is_not_cut(folder: Path, written: str, value: object) -> None:
    config = load_config("base.yaml", [f"rewards.exact.options.x={written}"]).config

    assert isinstance(config.rewards["exact"], FunctionReward)
    assert config.rewards["exact"].options == {"x": value}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[0-9]+", "not valid YAML: expected '<document start>'"),
        ("{question} Think.", "not valid YAML: expected '<document start>'"),
        ("{question}", "{question} is a map without values"),
        ("@x", "not valid YAML: while scanning for the next token"),
        ("`x`", "not valid YAML: while scanning for the next token"),
        ('"Q: {q}" Think.', "not valid YAML: expected '<document start>'"),
        ("*.jsonl", "not valid YAML: while scanning an alias"),
        ("!important", "the tag '!important' is not supported"),
    ],
)
def test_text_that_yaml_takes_for_something_else_is_told_to_need_quotes(folder: Path, text: str, why: str) -> None:
    override = f"validation.answer={text}"
    message = error_of("base.yaml", override)
    assert message.startswith(f"override {override!r}: {why}")
    assert message.endswith("; if it is meant as text, it needs quotes inside those of the shell: KEY='\"...\"'")
    quoted = f"validation.answer={json.dumps(text)}"
    assert load_config("base.yaml", [quoted]).config.validation.answer == text


@pytest.mark.parametrize("nothing", ["", "~", "null", "Null", "NULL", " null "])
def test_a_value_on_the_command_line_may_be_nothing(folder: Path, nothing: str) -> None:
    assert load_config("base.yaml", [f"validation.answer={nothing}"]).config.validation.answer is None


def test_a_program_sets_any_text(folder: Path) -> None:
    """As one setting, and in a map."""
    texts = {"a": "#### ?(-?[\\d,.]+)", "b": "Prefer answer #1", "c": " '5' # or more", "d": "1e5", "e": "---", "f": ""}
    settings = {f"rewards.exact.options.{name}": text for name, text in texts.items()}

    for overrides in (settings, {"rewards": {"exact": {"options": texts}}}):
        config = load_config("base.yaml", as_overrides(overrides)).config
        assert isinstance(config.rewards["exact"], FunctionReward)
        assert config.rewards["exact"].options == texts


@pytest.mark.parametrize("override", ["foo", "=1", "a..b=1", ".a=1"])
def test_an_override_that_is_no_assignment_shows_how_to_write_one(folder: Path, override: str) -> None:
    assert error_of("base.yaml", override) == f"override {override!r}: write KEY.SUB=VALUE, such as optimizer.lr=1e-4"


def test_a_key_named_like_the_type_of_its_source_confuses_nobody(folder: Path) -> None:
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
def test_a_mistake_about_datasets_names_the_entry(folder: Path, value: str, message: str) -> None:
    override = f"data.train={value}"

    assert error_of("base.yaml", override) == f"override {override!r}: {message}"


def test_one_dataset_of_several_may_be_overridden(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: base.yaml\ndata: {train: {a: {path: a}, b: {path: b, weight: 2}}}\n")

    config = load_config("mine.yaml", ["data.train.a.weight=0.5"]).config

    assert [(one.key, one.name, one.dataset.path, one.dataset.weight) for one in config.data.train_sets()] == [
        ("data.train.a.path", "a", "a", 0.5),
        ("data.train.b.path", "b", "b", 2.0),
    ]


def test_a_mistake_in_a_file_is_told_with_its_line(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: base.yaml\n\nsampling:\n  num_samples: 4\n  temprature: 1\n")

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
def test_a_dotted_key_in_a_file_is_told_how_files_write_it(folder: Path, text: str, told: str) -> None:
    (folder / "mine.yaml").write_text(f"extends: base.yaml\n{text}\n")

    assert error_of("mine.yaml") == f"mine.yaml:2: {told}"


def test_all_mistakes_are_told_at_once_a_line_each(folder: Path) -> None:
    (folder / "mine.yaml").write_text("seed: -1\nrewards: {m: {type: http}}\nnme: x\n")

    assert error_of("mine.yaml").splitlines() == [
        "mine.yaml:1: seed = -1: must be greater than or equal to 0",
        "mine.yaml: model.path is not set; set it in the file, or with the override model.path=VALUE",
        "mine.yaml: data.train is not set; set it in the file, or with the override data.train=VALUE",
        "mine.yaml:2: rewards.m.url is not set; set it in the file, or with the override rewards.m.url=VALUE",
        "mine.yaml:3: unknown key 'nme'; did you mean 'name'?",
    ]


def test_what_is_missing_is_told_of_the_file_and_not_of_an_override_beside_it(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: base.yaml\nmodel: null\n")

    assert error_of("mine.yaml", "seed=2").startswith("mine.yaml: model.path is not set")
    assert error_of("base.yaml", "rewards.exact.target=null", "rewards.exact.weight=2").startswith("override")


def test_a_long_value_is_cut_in_errors(folder: Path) -> None:
    message = error_of("base.yaml", f"optimizer.lr={'x' * 500}").rpartition("optimizer.lr = ")[2]

    assert len(message) < 100


def test_integers_are_numbers_where_numbers_are_due(folder: Path) -> None:
    assert (
        load_config("base.yaml", ["sampling.temperature=1", "worker.engine_args.n=1"]).config.sampling.temperature
        == 1.0
    )


def test_an_override_may_hold_a_whole_map(folder: Path) -> None:
    source = {"type": "http", "url": "http://host:1"}

    config = load_config("base.yaml", [f"rewards.other={json.dumps(source)}"]).config

    assert list(config.rewards) == ["exact", "other"]


def test_code_of_a_recipe_is_found_in_the_working_directory_and_then_beside_the_file_that_names_it(
    folder: Path,
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.yaml").write_text(
        "extends: ../base.yaml\nalgorithm: {loss: 'own.py:loss', advantages: 'own.py:advantages', loss_args: {x: 1}}\n"
    )

    def named() -> tuple[str, str]:
        loaded = load_config("sub/mine.yaml")
        assert loaded.origin("algorithm.loss") == "sub/mine.yaml:2"
        assert loaded.config.algorithm.loss_args == {"x": 1}
        return loaded.config.algorithm.loss, loaded.config.algorithm.advantages

    assert named() == ("own.py:loss", "own.py:advantages"), "where it is nowhere, it stays as it was written"
    (folder / "sub" / "own.py").touch()
    assert named() == ("sub/own.py:loss", "sub/own.py:advantages")
    (folder / "own.py").touch()
    assert named() == ("own.py:loss", "own.py:advantages")
