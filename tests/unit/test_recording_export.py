"""What other programs get of a recording."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from streamrl.extras import install
from streamrl.ops.cli.main import main
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin, Recording
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import encode_group
from tests.helpers import make_group, make_sample, make_ticket
from tests.unit.test_recording import make_entry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with nothing but a tokenizer: token i is the word w<i>."""
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {f"w{i}": i for i in range(10)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Two groups, a failure, and an entry that is nothing."""
    header, body = encode_group(make_group(make_ticket(2), samples=(), error="the engine said no"))
    failure = Entry(id="1002-0", number=2, run_uid="uid", header=header, body=body)
    junk = Entry(id="1003-0", number=3, run_uid="uid", header=b"junk", body=b"")
    origin = Origin(run="run", run_uid="uid", fingerprint="model", model=str(model))
    with RecordingWriter(tmp_path / "recording", origin, file_bytes=1 << 20, max_bytes=1 << 30) as writer:
        writer.append([make_entry(0), make_entry(1), failure, junk])
    return tmp_path / "recording"


def test_json_lines_hold_a_group_a_line_with_its_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "export", str(folder)]) == 0

    shown = capsys.readouterr()
    lines: list[dict[str, Any]] = [json.loads(line) for line in shown.out.splitlines()]
    assert [(line["ticket"], line["error"]) for line in lines] == [(0, ""), (1, ""), (2, "the engine said no")]
    assert lines[0]["prompt"] == "w0 w1 w2"
    expected = make_sample(reward=1.0)
    sample = lines[0]["samples"][1]
    assert sample["token_ids"] == expected.token_ids.tolist()
    assert sample["text"] == "w0 w1 w2 w3"
    assert sample["spans"] == [{"version": "1.0", "step": 0, "start": 0, "end": 4}]
    assert (sample["reward"], sample["rewards"]) == (1.0, {"exact": 1.0})
    assert shown.err == "3 groups with 4 samples, 1 of the groups failed; 1 were unreadable and are left out\n"


def test_a_damaged_group_is_left_out_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Recording.open(folder).places[1]
    with damaged.path.open("r+b") as file:
        file.seek(damaged.offset)
        file.write(b"gone")

    assert main(["record", "export", str(folder)]) == 0

    shown = capsys.readouterr()
    assert [json.loads(line)["ticket"] for line in shown.out.splitlines()] == [0, 2]
    assert "; 2 were unreadable and are left out" in shown.err


def test_parquet_holds_a_sample_a_row(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    assert main(["record", "export", str(folder), "--format", "parquet", "--output", str(path)]) == 0

    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [(row["ticket"], row["sample"], row["reward"]) for row in rows] == [
        (0, 0, 0.0),
        (0, 1, 1.0),
        (1, 0, 0.0),
        (1, 1, 1.0),
    ]
    assert rows[1]["rewards"] == [("exact", 1.0)]
    assert (rows[1]["prompt"], rows[1]["text"]) == ("w0 w1 w2", "w0 w1 w2 w3")
    assert rows[1]["logprobs"] == [-0.5] * 4


def test_without_words_there_are_token_ids_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    assert main(["record", "export", str(folder), "--output", str(path), "--no-text"]) == 0

    first = json.loads(path.read_text().splitlines()[0])
    assert "prompt" not in first
    assert "text" not in first["samples"][0]


def test_parquet_without_its_package_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))

    assert main(["record", "export", str(folder), "--format", "parquet", "--output", str(tmp_path / "x")]) == 2
    assert f"`{install('parquet')}`" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--format", "parquet"], "name it with --output FILE"),
        (["--output", "nowhere/x.jsonl"], "there is no folder 'nowhere'"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: there is no tokenizer.json"),
    ],
)
def test_mistakes_are_told_with_their_remedy(
    folder: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "export", str(folder), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_info_counts_tickets_without_an_answer_and_verifies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "info", str(folder), "--verify", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["groups"], told["tickets"], told["tickets_without_answer"]) == (4, 4, 0)
    assert (told["torn_bytes"], told["damaged"]) == (0, [])
    [path] = folder.glob("*.groups")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    assert main(["record", "info", str(folder), "--verify"]) == 1
