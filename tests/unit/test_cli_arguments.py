"""Arguments are looked at before the work: files to write, and options that would be ignored or are vLLM's."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import click
import pytest

from streamrl.ops.cli.arguments import MovingLine
from streamrl.ops.cli.main import main
from streamrl.ops.cli.watching.record import _num_bytes
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


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("7", 7), ("7B", 7), ("500MB", 500_000_000), ("2g", 2_000_000_000), ("2GiB", 2 << 30), ("1.5 kib", 1536)],
)
def test_a_size_is_of_thousands_or_with_an_i_of_1024(text: str, num_bytes: int) -> None:
    assert _num_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["7i", "7iB", "GB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size; write a number of bytes, or for example"):
        _num_bytes(text)


def test_options_of_vllm_come_after_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-model-len", "4096", "./sft"]) == 2
    assert "error: --max-model-len: an option of vLLM's comes after the model" in capsys.readouterr().err


@pytest.mark.parametrize(("term", "shown"), [("xterm", "\r\x1b[Kloading /a/long…\r\n"), ("dumb", "")])
def test_a_line_that_moves_is_never_wrapped_and_only_shown_where_it_can_be_overwritten(
    term: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "17")
    reader, writer = pty.openpty()
    seen = b""
    with os.fdopen(writer, "w", encoding="utf-8") as screen:
        monkeypatch.setattr("sys.stderr", screen)
        line = MovingLine()
        line.show("loading /a/long/path")
        line.end()
        print("!", end="", file=screen, flush=True)
        while not seen.endswith(b"!"):
            seen += os.read(reader, 1 << 16)
    os.close(reader)
    assert seen.decode() == f"{shown}!"
