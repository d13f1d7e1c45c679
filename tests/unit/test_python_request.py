"""What `streamrl.start` makes of its arguments: a configuration, overrides, and where workers find each reward."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.config.schema import OwnRewardServer
from streamrl.errors import ConfigError
from streamrl.ops.cli.main import main
from streamrl.ops.python.request import Request, Rewards, make_request
from streamrl.recipe.own import load_function
from streamrl.recipe.rewards import exact_match

PLAIN = {"model": {"path": "model"}, "data": {"train": "prompts.jsonl"}, "validation": {"every_steps": 0}}
FOLDER = Path("runs/mine")


def near(prompt: str, completion: str, token_ids: list[int], fields: dict[str, Any]) -> float:
    return 1.0


def make_near(scale: float) -> Callable[..., float]:
    def near(prompt: str, completion: str, token_ids: list[int], fields: dict[str, Any]) -> float:
        return len(completion) / scale

    return near


def asked(config: Any = PLAIN, overrides: dict[str, Any] | None = None, rewards: Rewards | None = (near,)) -> Request:
    return make_request(config, overrides, rewards, takeover=False)


def targets(rewards: Rewards) -> dict[str, str]:
    """By source, as the run's configuration has them."""
    request = asked(rewards=rewards)
    config = load_config(request.config, (*request.overrides, *request.targets(FOLDER))).config
    return {name: source.target for name, source in config.rewards.items()}  # type: ignore[union-attr]


def test_a_function_that_can_be_imported_is_named_by_its_module() -> None:
    assert targets([near, exact_match]) == {
        "near": "tests.unit.test_python_request:near",
        "exact_match": "streamrl.recipe.rewards:exact_match",
    }


def test_a_function_of_a_file_is_named_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the program finds beside itself, and a worker would not by its module's name."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "of_a_file.py").write_text("def near(completions, **kwargs): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    from of_a_file import near as of_a_file  # type: ignore[import-not-found]

    assert targets([of_a_file]) == {"near": f"{tmp_path}/scripts/of_a_file.py:near"}
    monkeypatch.chdir(tmp_path)
    assert targets([of_a_file]) == {"near": "scripts/of_a_file.py:near"}


@pytest.fixture
def package_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "scripts" / "mylib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text("SCALE = 3.0\n")
    (package / "of_lib.py").write_text(
        "from mylib.scale import SCALE\n"
        "def times(x): return SCALE * x\n"
        "def near(prompt, completion, token_ids, fields): return times(len(completion))\n"
        "def make(): return lambda prompt, completion, token_ids, fields: times(1)\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


def loaded_elsewhere(folder: Path, code: bytes) -> str:
    """What the function gives for four characters, in a process like a worker's."""
    (folder / "near.pkl").write_bytes(code)
    program = (
        "import sys; from streamrl.recipe.own import load_function\n"
        "print(load_function(sys.argv[1], {})('', 'four', [], {}))"
    )
    words = [sys.executable, "-c", program, f"{folder}/near.pkl:near"]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=240).stdout.strip()


def test_a_function_of_a_package_that_workers_do_not_find_goes_with_the_run(
    package_beside_the_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mylib.of_lib import make, near  # type: ignore[import-not-found]

    assert targets([near]) == {"near": "runs/mine/rewards/near.pkl:near"}
    assert loaded_elsewhere(tmp_path, asked(rewards=[near]).functions["near"]) == "12.0"
    assert loaded_elsewhere(tmp_path, asked(rewards={"near": make()}).functions["near"]) == "3.0"
    monkeypatch.setenv("PYTHONPATH", str(package_beside_the_program.parent))
    assert targets([near]) == {"near": "mylib.of_lib:near"}
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(package_beside_the_program.parent)
    assert targets([near]) == {"near": "mylib.of_lib:near"}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(make_near(2.0), id="a closure"),
        pytest.param(lambda prompt, completion, token_ids, fields: 1.0, id="a lambda"),
        pytest.param(functools.partial(near), id="a partial function"),
    ],
)
def test_a_function_that_no_module_has_goes_with_the_run_under_the_name_of_its_source(function: Any) -> None:
    assert targets({"mine": function}) == {"mine": "runs/mine/rewards/mine.pkl:mine"}


def test_functions_of_a_list_have_their_names_and_a_lambda_that_of_its_place() -> None:
    found = targets([make_near(2.0), lambda completions, **kwargs: [0.0], "exact_match", "my_rewards.py:far"])

    assert list(found) == ["near", "reward_1", "exact_match", "far"]
    assert (found["exact_match"], found["far"]) == ("exact_match", "my_rewards.py:far")


def test_another_function_of_this_name_gives_the_same_configuration() -> None:
    """A notebook's cell that is run again makes another function, and a second start is to go on with the run."""
    assert targets([make_near(2.0)]) == targets([make_near(3.0)])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([make_near(1.0), make_near(2.0)], "two of them are called 'near'"),
        ({"far-off": near}, "rewards: 'far-off' is not a valid name"),
        ({"near": 1.0}, "rewards.near = 1.0: must be a function"),
        (near, "must be a list of functions, or a map"),
        ("exact_match", "must be a list of functions, or a map"),
    ],
)
def test_what_cannot_be_a_reward_is_told_in_a_line(rewards: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(rewards=rewards)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_holds_what_cannot_travel_is_told_with_its_reason() -> None:
    lock = threading.Lock()

    def guarded(prompt: str, completion: str, token_ids: list[int], fields: dict[str, Any]) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"^rewards.guarded: .*cannot pickle '_thread.lock' object; create"):
        asked(rewards=[guarded])


def test_given_rewards_take_the_place_of_the_configurations_and_overrides_have_the_last_word() -> None:
    config = PLAIN | {"rewards": {"exact": {"type": "function", "target": "exact_match", "weight": 0.2}}}
    request = asked(
        config, {"rewards.near.weight": 0.5, "training": {"max_steps": 7}, "dir": Path("elsewhere")}, [near]
    )

    found = load_config(request.config, request.overrides).config

    assert {name: source.weight for name, source in found.rewards.items()} == {"near": 0.5}
    assert (found.training.max_steps, found.dir) == (7, Path("elsewhere"))
    kept = asked(config, rewards=None)
    assert list(load_config(kept.config, kept.overrides).config.rewards) == ["exact"]


@pytest.mark.parametrize("weight", [{"rewards": {"near": {"weight": 0.5}}}, {"rewards.near": {"weight": 0.5}}])
def test_overrides_may_be_maps_that_merge_with_the_given_rewards(weight: dict[str, Any]) -> None:
    request = asked("pretrained.yaml", weight, [near])

    found = load_config(request.config, request.overrides).config

    assert {name: source.weight for name, source in found.rewards.items()} == {"near": 0.5}


@pytest.mark.parametrize("rewards", [[], {}])
def test_no_given_rewards_are_none_whether_or_not_the_configuration_has_some(rewards: Rewards) -> None:
    for before in ({}, {"rewards": {"exact": {"type": "function", "target": "exact_match"}}}):
        request = asked(PLAIN | before, rewards=rewards)
        assert load_config(request.config, request.overrides).config.rewards == {}


def test_given_rewards_leave_no_reward_server_that_nothing_asks() -> None:
    def server(overrides: dict[str, Any] | None = None) -> OwnRewardServer | None:
        request = asked("reinforce.yaml", overrides, [near])
        config = load_config(request.config, request.overrides).config
        check_config(config)
        return config.reward_server

    assert server() is None
    assert server({"rewards.model": {"type": "http", "url": "local"}}) is not None
    assert server({"rewards": {"model": {"type": "http", "url": "local"}}}) is not None


def test_a_map_may_extend_a_file_as_a_file_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("seed: 5\n")

    assert load_config(
        PLAIN | {"extends": "base.yaml", "rewards": {"r": {"type": "function", "target": "exact_match"}}}
    )
    with pytest.raises(ConfigError, match=r"^configuration: extends = 'other.yaml': there is no file other.yaml"):
        load_config(PLAIN | {"extends": "other.yaml"})
    with pytest.raises(ConfigError, match=r"^configuration: unknown key 'sede'; did you mean 'seed'"):
        load_config(PLAIN | {"sede": 1, "rewards": {"r": {"type": "function", "target": "exact_match"}}})


def test_a_wrong_override_is_told_as_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    request = asked("quickstart.yaml", {"sampling.temprature": 1}, rewards=None)

    with pytest.raises(ConfigError) as caught:
        load_config(request.config, request.overrides)

    assert main(["config", "show", "quickstart.yaml", "sampling.temprature=1"]) == 2
    assert f"error: {caught.value}\n" == capsys.readouterr().err


@pytest.mark.parametrize("overrides", [["optimizer.lr=1e-4"], "optimizer.lr=1e-4"])
def test_overrides_written_as_on_a_command_line_are_told_how_they_are_written_here(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"overrides = .*: must be a map, such as {'optimizer.lr': 1e-4}"):
        asked(overrides=overrides)


def test_what_no_setting_can_be_is_told() -> None:
    with pytest.raises(ConfigError, match=r"> is not a value for a setting"):
        asked(PLAIN, {"seed": object()})


def test_a_request_reaches_the_launcher_as_it_was() -> None:
    request = asked(PLAIN | {"dir": Path("runs")}, {"seed": 3}, [make_near(2.0)])

    again = Request.from_json(request.to_json())

    assert (again.config, again.overrides, again.functions) == (
        PLAIN | {"dir": "runs"},
        request.overrides,
        request.functions,
    )


def test_a_pickled_function_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With what it uses of a program's own file, which a worker does not have."""
    program = f"""
from pathlib import Path
from streamrl.recipe.own import pickled
FACTOR = 3.0
def times(x): return FACTOR * x
def mine(prompt, completion, token_ids, fields): return times(len(completion))
Path({str(tmp_path)!r}, "mine.pkl").write_bytes(pickled(mine))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)

    assert load_function(f"{tmp_path}/mine.pkl:mine", {})("", "four", [], {}) == 12.0


def test_a_function_of_another_python_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mine.pkl").write_bytes(b"3.9.1\n" + b"whatever")

    with pytest.raises(
        RuntimeError, match=r"mine.pkl was pickled by Python 3.9.1, but this is 3.* call streamrl.start"
    ):
        load_function(f"{tmp_path}/mine.pkl:mine", {})
    with pytest.raises(FileNotFoundError, match=r"no such file: .*none.pkl"):
        load_function(f"{tmp_path}/none.pkl:none", {})
