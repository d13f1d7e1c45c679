"""A folder laid out like a hub's dataset, for tests without a network: GSM8K, with its layout and columns."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

_CARD = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# GSM8K
"""


def gsm8k_rows(num_rows: int, *, first: int = 0) -> list[dict[str, str]]:
    return [
        {
            "question": f"Natalia sold {i} clips in April, and half as many in May. How many altogether?",
            "answer": f"In May: {i}/2 = <<{i}/2={i / 2:g}>>{i / 2:g}.\nAltogether {1.5 * i:g}.\n#### {1500 * i:,.0f}",
        }
        for i in range(first, first + num_rows)
    ]


def write_gsm8k(folder: Path, *, num_train: int = 6, num_test: int = 3) -> Path:
    rows = {
        "main/train": gsm8k_rows(num_train),
        "main/test": gsm8k_rows(num_test, first=100),
        "socratic/train": gsm8k_rows(1, first=200),
    }
    for name, table in rows.items():
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    (folder / "README.md").write_text(_CARD)
    return folder


def write_gsm8k_files(folder: Path, *, num_train: int = 6, num_test: int = 3) -> None:
    """Write it in its authors' format: train.jsonl and test.jsonl."""
    for name, rows in (("train", gsm8k_rows(num_train)), ("test", gsm8k_rows(num_test, first=100))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
