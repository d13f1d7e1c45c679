"""The command line: it answers at once, teaches, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module

import click
import pytest

from streamrl import __version__
from streamrl.errors import ConfigError, TransportError
from streamrl.ops.cli import commands, main


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


def imported_by(argv: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Which of the modules a command imports."""
    result = run_python(
        f"import sys; from streamrl.ops.cli.main import main; main({list(argv)!r}); "
        f"print('imported:', *[m for m in {list(modules)!r} if m in sys.modules])"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()[1:]


def test_help_lists_every_command_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in commands.COMMANDS)
    assert "streamrl up conf/pretrained.yaml" in shown


def test_no_command_shows_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    assert imported_by(["--help"], ["torch", "vllm", "transformers", "pydantic", "redis", "numpy", "yaml"]) == []


def test_help_takes_at_most_twice_the_time_of_importing_redis_and_a_fifth_of_a_second() -> None:
    def fastest(code: str) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            assert run_python(code).returncode == 0
            times.append(time.perf_counter() - begun)
        return min(times)

    assert fastest("from streamrl.ops.cli.main import main; main(['--help'])") <= 2 * fastest("import redis") + 0.2


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"streamrl, version {__version__}\n"


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_in_the_list_can_be_loaded(name: str) -> None:
    module, _, attribute = commands.COMMANDS[name].target.partition(":")

    assert isinstance(getattr(import_module(module), attribute), click.Command)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_loading_a_command_imports_neither_torch_nor_vllm(name: str) -> None:
    assert imported_by([name, "--help"], ["torch", "vllm", "transformers"]) == []


def test_a_mistyped_command_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["confg"]) == 2
    assert "no command 'confg'; did you mean 'config'?" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["streamrl conf", "streamrl confg "])
def test_the_shell_completes_commands_and_a_mistyped_one_prints_no_error_into_its_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_STREAMRL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        main.main([])
    shown = capsys.readouterr()
    assert "plain,config\n" in shown.out
    assert shown.err == ""


def test_an_unknown_option_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--frobnicate"]) == 2
    assert "--frobnicate" in capsys.readouterr().err


def test_a_setting_with_dashes_is_told_how_settings_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["up", "run.yaml", "--optimizer.lr=1e-5"]) == 2
    assert "Settings have no dashes: optimizer.lr=VALUE" in capsys.readouterr().err


@click.command()
@click.argument("kind")
def failing(kind: str) -> None:
    raise {
        "user": ConfigError("seed = x: must be a number"),
        "deliberate": TransportError("no answer"),
        "interrupt": KeyboardInterrupt(),
        "refused": PermissionError(errno.EACCES, "Permission denied", "/x/config.yaml"),
        "full": OSError(errno.ENOSPC, "No space left on device", "/x/plot.png"),
        "wrapped": ValueError("Error building `default` serializer:\n  KeyboardInterrupt: "),  # as pydantic-core does
        "defect": ZeroDivisionError("a defect"),
        "missing": FileNotFoundError(errno.ENOENT, "No such file", "/x"),
    }[kind]


@click.command()
def choosing() -> int:
    return 7


DOUBLES = {
    "failing": commands.CommandEntry(f"{__name__}:failing", "Fails as it is told."),
    "choosing": commands.CommandEntry(f"{__name__}:choosing", "Chooses its exit code."),
}


@pytest.mark.parametrize(
    ("kind", "exit_code", "shown"),
    [
        ("user", 2, "error: seed = x: must be a number\n"),
        ("deliberate", 1, "error: no answer\n"),
        ("interrupt", 130, "\n"),
        ("wrapped", 130, ""),
        ("refused", 2, "error: /x/config.yaml: Permission denied\n"),
        ("full", 2, "error: /x/plot.png: No space left on device\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    kind: str, exit_code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["failing", kind], commands=DOUBLES) == exit_code
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize(("kind", "error"), [("defect", ZeroDivisionError), ("missing", FileNotFoundError)])
def test_a_defect_keeps_its_traceback(kind: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        main.main(["failing", kind], commands=DOUBLES)


def test_a_command_may_choose_its_exit_code() -> None:
    assert main.main(["choosing"], commands=DOUBLES) == 7


def test_a_reader_that_has_gone_is_neither_a_finding_nor_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from streamrl.ops.cli.main import main; sys.exit(main(['export', 'alerts']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=240, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@click.command()
def say_what_is_not_ascii() -> None:
    click.echo("0.1 → 0.9 · Ж")


def test_a_terminal_that_knows_few_characters_gets_question_marks_and_no_error() -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    entry = commands.CommandEntry(target=f"{__name__}:say_what_is_not_ascii", help="")
    with contextlib.redirect_stdout(screen):
        assert main.main(["say"], commands={"say": entry}) == 0

    screen.flush()
    assert screen.buffer.getvalue() == b"0.1 ? 0.9 \xb7 ?\n"  # type: ignore[attr-defined]
