"""Logs: one JSON object a line in the file, harmless text on a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from streamrl.telemetry.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_line_of_the_file_is_json_with_part_time_and_level(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "worker-1.jsonl"
    configure_logging("worker/1", file)
    structlog.get_logger("streamrl.workers.rollout").info("group_delivered", ticket=3, reward=0.5)
    logging.getLogger("some.library").warning("slow %s", "prefill")
    ours, theirs = lines(file)
    assert (ours["event"], ours["ticket"], ours["reward"]) == ("group_delivered", 3, 0.5)
    assert (ours["part"], ours["level"]) == ("worker/1", "info")
    assert not [name for name in ours if name.startswith("_")]  # which structlog hangs onto a record
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("slow prefill", "some.library", "warning")
    assert all(str(line["timestamp"]).endswith("Z") for line in (ours, theirs))


def test_the_line_that_httpx_logs_for_every_request_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    configure_logging("worker/1", file)
    logging.getLogger("httpx").info("HTTP Request: POST http://localhost/score")
    logging.getLogger("httpx").warning("something odd")
    assert [line["event"] for line in lines(file)] == ["something odd"]


def test_an_exception_is_kept_with_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    configure_logging("learner/0", file)
    try:
        raise ValueError("a shape is wrong")
    except ValueError:
        structlog.get_logger().exception("step_failed")
    [line] = lines(file)
    assert "a shape is wrong" in json.dumps(line["exception"])
    assert "test_logs.py" in json.dumps(line["exception"])


def give_a_password_to_a_server_that_is_gone() -> None:
    password = "-".join(("hunter2", "was", "read"))  # which the line of the program does not show
    try:
        raise ConnectionError("closed by server")
    except ConnectionError as error:
        raise RuntimeError(f"no word to send {len(password)} characters to") from error


def test_a_traceback_shows_no_values_of_variables_for_passwords_are_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, file = Terminal(), tmp_path / "log.jsonl"
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging("learner/0", file)
    try:
        give_a_password_to_a_server_that_is_gone()
    except RuntimeError:
        structlog.get_logger().error("no lease", exc_info=True)
        logging.getLogger("some.library").exception("no lease")
    assert len(lines(file)) == 2
    for written in (file.read_text(), terminal.getvalue()):
        assert "give_a_password_to_a_server_that_is_gone" in written
        assert "closed by server" in written
        assert "hunter2-was-read" not in written


def test_the_level_decides_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    configure_logging("learner/0", file, level="WARNING")
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(file)] == ["loud"]


def test_warnings_of_libraries_are_logged(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    configure_logging("learner/0", file)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("soon gone", DeprecationWarning, stacklevel=1)
    [line] = lines(file)
    assert "soon gone" in str(line["event"])


def test_configuring_again_replaces_what_was(tmp_path: Path) -> None:
    configure_logging("learner/0", tmp_path / "one.jsonl")
    configure_logging("learner/0", tmp_path / "two.jsonl")
    structlog.get_logger().info("once")
    assert lines(tmp_path / "one.jsonl") == []
    assert len(lines(tmp_path / "two.jsonl")) == 1


def test_a_terminal_shows_readable_lines_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    file = tmp_path / "log.jsonl"
    configure_logging("worker/1", file)
    structlog.get_logger().info("sample", completion="\x1b[2Jgone\x07")
    shown = terminal.getvalue()
    assert "sample" in shown
    assert "gone" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert lines(file)[0]["completion"] == "\x1b[2Jgone\x07"


def test_without_a_terminal_the_file_alone_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker/1", tmp_path / "log.jsonl")
    structlog.get_logger().info("hidden")
    assert capsys.readouterr().err == ""


def test_without_a_file_stderr_is_written_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker/1", None)
    structlog.get_logger().info("shown", ticket=3)
    err = capsys.readouterr().err
    assert "shown" in err
    assert "\x1b" not in err
