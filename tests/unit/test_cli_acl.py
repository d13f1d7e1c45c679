"""`streamrl redis acl`: no mistake with the passwords' files may open Redis to everybody."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.ops.cli.main import main
from streamrl.protocol.transport.acl import ROLES
from tests.pages import ROOT, blocks

STREAMRL = [sys.executable, "-m", "streamrl.ops.cli.main"]


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    folder = tmp_path / "PASSWORDS"
    folder.mkdir()
    for role in ROLES:
        (folder / role).write_text(f"of-{role}\n")
    return folder


@pytest.mark.parametrize("form", ["users", "commands"])
@pytest.mark.parametrize("role", ROLES)
def test_without_one_of_the_passwords_nothing_is_printed(
    passwords: Path, form: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (passwords / role).unlink()
    assert main(["redis", "acl", "--passwords", str(passwords), "--format", form]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"PASSWORDS/{role}" in said.err


def test_the_default_user_is_off_first_in_a_file_and_last_in_commands(
    passwords: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for form in ("users", "commands"):
        assert main(["redis", "acl", "--passwords", str(passwords), "--format", form]) == 0
        said.append(capsys.readouterr().out.splitlines())
    assert (said[0][0], said[1][-1]) == ("user default off", "ACL SETUSER default off")
    assert [line.split()[1] for line in said[0][1:]] == [line.split()[2] for line in said[1][:-1]] == list(ROLES)


@pytest.mark.parametrize("missing", ["PASSWORDS/learner", "own.acl"])
def test_the_pages_rotation_loads_no_users_while_a_file_is_missing(
    passwords: Path, tmp_path: Path, missing: str
) -> None:
    (page,) = [each for each in blocks(ROOT / "docs" / "operations.md", "sh") if "test_secrets_changed" in each.note]
    tell = page.text.partition("for role in")[0]
    (tmp_path / "own.acl").write_text("user admin on nopass ~* &* +@all\n")
    for name, command in {"streamrl": f"exec {shlex.join(STREAMRL)}", "redis-cli": "echo loaded"}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def told() -> tuple[bool, str]:
        shell = ["sh", "-c", f"{tell}\ntell"]
        done = subprocess.run(shell, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=240)
        return done.returncode == 0, done.stdout

    assert told() == (True, "loaded ACL LOAD\n")
    users = (tmp_path / "users.acl").read_text().splitlines()
    assert [line.split()[1] for line in users] == ["default", *ROLES, "admin"]
    (tmp_path / missing).unlink()
    assert told() == (False, "")
    assert (tmp_path / "users.acl").read_text().startswith("user default off\n")
