"""A run whose base model has moved: its checkpoints are read on the base that `--model` names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.ops.cli.main import main
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """A run of adapters, whose model is called `moved` by now."""
    folder = tmp_path_factory.mktemp("run")
    config = make_replay_run(
        folder,
        model=schema.Model(path=str(folder / "model"), dtype="float32", lora=schema.Lora(rank=4)),
        training=schema.Training(groups_per_step=4, max_steps=1),
        num_prompts=10,
    )
    run_replay(config, make_recording(folder / "recording", config, make_entries(config, range(4))))
    Path(config.model.path).rename(folder / "moved")
    return config


def moved(run: schema.Config) -> str:
    return str(Path(run.model.path).with_name("moved"))


@pytest.mark.parametrize("command", [["weights", "export", "--to", "{folder}/made"], ["serve"], ["chat"]])
def test_a_base_model_that_is_gone_is_told_in_a_line_with_the_remedy(
    run: schema.Config, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*(word.format(folder=tmp_path) for word in command), f"{run.folder}@1"]
    for model, key in (([], "model.path"), (["--model", run.model.path], "--model")):
        capsys.readouterr()

        assert main([*words, *model]) == 2

        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"error: {key} = '{run.model.path}': there is no such folder, ")
        assert told.endswith(f"; --model FOLDER names the base model of {run.folder}@1 (step 1), wherever it is now")
    assert list(tmp_path.iterdir()) == []


def test_a_name_on_a_hub_that_cannot_be_read_has_the_same_remedy(
    run: schema.Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["chat", f"{run.folder}@1", "--prompt", "a", "--model", "nobody/nothing"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: model.path 'nobody/nothing' cannot be read: ")
    assert "; --model FOLDER names the base model of" in told


def test_the_base_model_is_found_where_it_is_said_to_be(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    assert main(["weights", "export", f"{run.folder}@1", "--to", str(made), "--model", moved(run)]) == 0
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (made / file).read_bytes() == (run.folder / "export" / file).read_bytes()
    assert json.loads((made / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == moved(run)

    said = []
    for subject in ([f"{run.folder}@1", "--model", moved(run)], [str(made)]):
        capsys.readouterr()
        assert main(["chat", *subject, "--prompt", "say a:", "--temperature", "0", "--max-tokens", "8"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize("command", [["chat"], ["serve"], ["weights", "export", "--to", "made"]])
def test_a_whole_model_has_no_other_base(
    run: schema.Config, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    export = run.folder / "export"
    assert main([*command, str(export), "--model", moved(run)]) == 2
    told = f"--model {moved(run)}: does not apply to {export}, which is a whole model; leave it out"
    assert told in capsys.readouterr().err
