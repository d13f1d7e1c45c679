"""Arguments are looked at before the work: files to write, and options that would be ignored or are vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.ops.cli.main import main
from tests.run_folders import make_folder


@pytest.mark.parametrize(
    "command",
    [
        "plot runs/x --output",
        "eval runs/x --output",
        "record export recording --output",
        "reward read-hh source --prompts x --pairs",
        "reward read-hh source --pairs x --prompts",
    ],
)
@pytest.mark.parametrize(
    ("output", "told"), [("nowhere/x.png", "there is no folder 'nowhere'"), ("folder.png", "is a directory")]
)
def test_where_nothing_can_be_written_the_command_says_so_at_once(
    command: str,
    output: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()

    assert main([*command.split(), output]) == 2

    assert told in capsys.readouterr().err


def test_a_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.pdf")]) == 2
    assert "must end in .png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("dashboard {run} --token --token-file token", "--token: not with --token-file"),
        ("plot {run} --run x", "--run: only with --redis"),
        ("doctor conf/quickstart.yaml --gpu-memory 80", "--gpu-memory: only with --gpus"),
        (
            "doctor conf/quickstart.yaml --gpus 8 --for worker --ask-services",
            "--for and --ask-services: not with --gpus",
        ),
        ("groups tail recording --eval --run x", "--run and --eval: only for a run, and recording is a recording"),
        ("groups show recording 1 --redis x", "--redis: only for a run, and recording is a recording"),
        (
            "reward try sandbox --data rows.jsonl --completion x --timeout-s 1 --network",
            "--timeout-s and --network: not with sandbox, whose limits are --option time_s=... and memory_mb=...",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_folder(tmp_path, "big", "finished")
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    Path("rows.jsonl").write_text('{"text": "x", "tests": []}\n')
    Path("recording").mkdir()
    Path("recording/0.groups").touch()

    assert main(words.format(run=run).split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_options_of_vllm_come_after_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-model-len", "4096", "./sft"]) == 2
    assert "error: --max-model-len: an option of vLLM's comes after the model" in capsys.readouterr().err
