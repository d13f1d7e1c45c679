"""Dialogues as in Anthropic's HH become preference pairs and prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from streamrl.data.texts import convert, split
from streamrl.errors import DataError

HI = "\n\nHuman: Hi\n\nAssistant:"


def write(path: Path, *rows: tuple[str, str]) -> Path:
    text = "".join(json.dumps({"chosen": chosen, "rejected": rejected}) + "\n" for chosen, rejected in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["hh.jsonl", "hh.jsonl.gz"])
def test_pairs_and_each_prompt_once(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, (HI + " Hello.", HI + " Go."), (HI + " Hello!", HI), (HI, HI))
    done = convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts")
    assert read(tmp_path / "pairs") == [
        {"prompt": HI, "chosen": " Hello.", "rejected": " Go."},
        {"prompt": HI, "chosen": " Hello!", "rejected": ""},
    ]
    assert read(tmp_path / "prompts") == [{"prompt": HI}]
    assert (done.num_pairs, done.num_prompts, done.num_skipped) == (2, 1, 1)


def test_the_prompt_ends_at_the_turn_where_the_dialogues_part() -> None:
    long = HI + " Yes?\n\nHuman: What is 2+2?\n\nAssistant:"
    assert split(long + " 4", long + " 5") == {"prompt": long, "chosen": " 4", "rejected": " 5"}
    early = split(HI + " Yes?\n\nHuman: A\n\nAssistant: a", HI + " No.\n\nHuman: B\n\nAssistant: b")
    assert early is not None
    assert early["prompt"] == HI
    assert split("\n\nHuman: one\n\nAssistant: a", "\n\nHuman: two\n\nAssistant: b") is None


def test_what_is_no_dialogue_is_named_by_file_and_line(tmp_path: Path) -> None:
    source = write(tmp_path / "hh.jsonl", (HI + "a", HI + "b"))
    source.write_text(source.read_text() + '{"chosen": 1}\n')
    with pytest.raises(DataError, match=r"hh\.jsonl:2: expected"):
        convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts")
    assert not (tmp_path / "pairs").exists()


def test_a_file_that_is_cut_or_absent_is_one_clear_error(tmp_path: Path) -> None:
    cut = write(tmp_path / "hh.jsonl.gz", (HI + "a", HI + "b"))
    cut.write_bytes(cut.read_bytes()[:-9])
    for source in (cut, tmp_path / "nothing.jsonl"):
        with pytest.raises(DataError, match="cannot read the dialogues"):
            convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts")


def test_a_byte_order_mark_and_empty_lines_are_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "hh.jsonl", (HI + "a", HI + "b"))
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes() + b"\n  \n")
    assert convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts").num_pairs == 1


@pytest.mark.parametrize("at", [12, -6])
def test_a_compressed_file_that_is_damaged_is_one_clear_error(tmp_path: Path, at: int) -> None:
    source = write(tmp_path / "hh.jsonl.gz", *((HI + str(i), HI + "b") for i in range(1000)))
    data = bytearray(source.read_bytes())
    data[at] ^= 0xFF
    source.write_bytes(data)
    with pytest.raises(DataError, match="cannot read the dialogues"):
        convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"chosen": "a\\ud800", "rejected": "b"}', r"\\ud800 is half of a surrogate pair"),
        (b'{"chosen": "\xff", "rejected": "b"}', "not UTF-8"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
    ],
)
def test_what_is_no_text_is_named_by_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    source = write(tmp_path / "hh.jsonl", (HI + "a", HI + "b"))
    source.write_bytes(source.read_bytes() + line + b"\n")
    with pytest.raises(DataError, match=rf"hh\.jsonl:2: expected .*: .*{why}"):
        convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts")


def test_a_number_that_is_none_in_a_column_that_is_not_read_is_no_mistake(tmp_path: Path) -> None:
    source = tmp_path / "hh.jsonl"
    source.write_text(json.dumps({"chosen": HI + "a", "rejected": HI + "b", "score": float("nan")}) + "\n")
    assert convert(source, pairs=tmp_path / "pairs", prompts=tmp_path / "prompts").num_pairs == 1
