"""`dtype: auto` is settled when a configuration is read: by the run that it goes on with, else by the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.config.load import config_from_json, dump_config, load_config
from streamrl.errors import ConfigError
from streamrl.gpus import Gpu
from streamrl.learner.process.ranks import World
from streamrl.learner.rank_context import refuse_other_dtypes

BASE = """\
name: mine
model: {path: base, dtype: auto}
data: {train: x.jsonl}
rewards:
  exact: {type: function, target: exact_match}
weights: {dtype: auto}
"""


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.half, self.gpus, self.are_old = False, 0, False
        monkeypatch.setattr("streamrl.config.precision.computes_in_bfloat16", lambda: self.half)
        monkeypatch.setattr("streamrl.config.precision.gpus_here", lambda: self.gpus * (self._gpu(),))

    def _gpu(self) -> Gpu:
        return Gpu(name="0", model="Tesla T4", has_bfloat16=not self.are_old)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE)
    return Machine(monkeypatch)


def dtypes(*overrides: str) -> tuple[str, str]:
    config = load_config("mine.yaml", overrides).config
    return config.model.dtype, config.weights.dtype


def test_a_new_run_computes_in_what_its_machine_is_fast_in(machine: Machine) -> None:
    assert dtypes() == ("float32", "float32")
    machine.half = True
    assert dtypes() == ("bfloat16", "bfloat16")
    machine.half, machine.gpus = False, 2
    assert dtypes() == ("bfloat16", "bfloat16")


def test_gpus_without_products_of_bfloat16_compute_in_float32(machine: Machine) -> None:
    machine.half, machine.gpus, machine.are_old = True, 2, True
    assert dtypes("learner.gpus=0") == ("bfloat16", "float32")
    loaded = load_config("mine.yaml")
    assert loaded.config.model.dtype == "float32"
    assert loaded.origin("model.dtype") == "mine.yaml:2: auto; GPU 0 (Tesla T4) has no native bfloat16"


def test_an_error_of_a_dtype_names_auto_among_the_choices(machine: Machine) -> None:
    for key, choices in (
        ("model.dtype", "'auto', 'float32', 'bfloat16' or 'float64'"),
        ("weights.dtype", "'auto', 'float32' or 'bfloat16'"),
    ):
        with pytest.raises(ConfigError, match=f"{key} = 'half': must be {choices}$"):
            dtypes(f"{key}=half")


def test_gpus_do_not_count_for_who_is_to_have_none(machine: Machine) -> None:
    machine.gpus = 2
    assert dtypes("learner.gpus=0") == ("float32", "bfloat16")
    assert dtypes("worker.gpus=0") == ("bfloat16", "float32")


def test_a_run_goes_on_in_what_it_began_with_wherever_it_goes_on(machine: Machine) -> None:
    machine.half = True
    begun = load_config("mine.yaml").config
    begun.folder.mkdir(parents=True)
    (begun.folder / "config.yaml").write_text(dump_config(begun))
    machine.half = False

    loaded = load_config("mine.yaml")

    assert loaded.config == begun
    assert loaded.origin("model.dtype") == "mine.yaml:2: auto; the run started with it (runs/mine/config.yaml)"
    assert dtypes("name=another") == ("float32", "float32")
    assert dtypes("model.dtype=float32") == ("float32", "bfloat16")


def test_what_is_told_to_workers_never_says_auto(machine: Machine) -> None:
    config = load_config("mine.yaml").config
    assert "auto" not in (config.model.dtype, config.weights.dtype)
    assert config_from_json(config.model_dump_json()) == config


class Told(World):
    """By a rank 0 on another machine."""

    words: bytes

    def broadcast(self, data: bytes | None) -> bytes:
        return self.words


def test_ranks_whose_machines_settle_it_otherwise_are_refused(machine: Machine) -> None:
    world = Told(rank=1, size=2, device=torch.device("cpu"))
    Told.words = b"model.dtype=float32, weights.dtype=float32"
    refuse_other_dtypes(load_config("mine.yaml").config, world)
    machine.half = True
    with pytest.raises(
        ConfigError, match=r"rank 1 .* model.dtype=bfloat16, .*, rank 0 has model.dtype=float32, .*`auto`"
    ):
        refuse_other_dtypes(load_config("mine.yaml").config, world)
