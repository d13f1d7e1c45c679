"""Exports a recording for other programs: JSON Lines, one group per line; Parquet, one sample per row.

Both are written to a temporary file and renamed when complete, with at most one batch in memory. Unreadable groups are
skipped and counted. Blocks on the disk only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

from streamrl.errors import DataError, ResourceError, WireError
from streamrl.ops.record.view import TokenDecoder
from streamrl.protocol.recording import Recording, open_group, read_group
from streamrl.protocol.transport.types import Entry, entry_order
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample
from streamrl.protocol.wire.turns import told_of
from streamrl.versions import show

_ROWS_A_BATCH = 512


@dataclass(slots=True, kw_only=True)
class Exported:
    num_groups: int = 0
    num_samples: int = 0
    num_failed: int = 0  # groups that report a failed ticket; JSON Lines only, since they have no samples
    num_unreadable: int = 0

    def __str__(self) -> str:
        line = f"{self.num_groups} groups with {self.num_samples} samples"
        line += f", {self.num_failed} of the groups failed" if self.num_failed else ""
        return line + (f"; {self.num_unreadable} were unreadable and are left out" if self.num_unreadable else "")


def to_json(entry: Entry, group: Group, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Convert one group; the documented form of `streamrl record export --format jsonl` and `streamrl groups
    --json`."""
    record: dict[str, Any] = {
        "id": entry.id,
        "at": entry_order(entry.id)[0] / 1000,
        **group.header.facts(),
        "prompt_ids": group.prompt_ids.tolist(),
        "samples": [_sample(sample, decoder) for sample in group.samples],
    }
    if decoder is not None:
        record["prompt"] = decoder.decode(group.prompt_ids)
    return record


def write_jsonl(recording: Recording, out: IO[bytes], decoder: TokenDecoder | None) -> Exported:
    exported = Exported()
    for entry, group in _groups(recording, exported):
        out.write(json.dumps(to_json(entry, group, decoder), ensure_ascii=False).encode() + b"\n")
    return exported


def write_parquet(recording: Recording, out: IO[bytes], decoder: TokenDecoder | None) -> Exported:
    """Write Parquet; the caller has checked that pyarrow is installed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    exported = Exported()
    schema = _parquet_schema(pa, with_text=decoder is not None)
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        for entry, group in _groups(recording, exported):
            rows += _rows(entry, group, decoder)
            if len(rows) >= _ROWS_A_BATCH:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return exported


def write_whole(path: Path, write: Callable[[IO[bytes]], Exported]) -> Exported:
    """Write a file that gets its name only when `write` has completed it."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            exported = write(out)
        temporary.rename(path)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return exported


def _groups(recording: Recording, exported: Exported) -> Iterator[tuple[Entry, Group]]:
    for path, places in groupby(recording.places, key=attrgetter("path")):
        with path.open("rb") as file:
            for place in places:
                try:
                    entry = read_group(file, place)
                    group = open_group(entry)
                except (DataError, WireError):
                    exported.num_unreadable += 1
                    continue
                exported.num_groups += 1
                exported.num_samples += len(group.samples)
                exported.num_failed += group.header.failed
                yield entry, group


def _sample(sample: Sample, decoder: TokenDecoder | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "turn_rewards": list(sample.turn_rewards),
        "token_rewards": [] if sample.token_rewards is None else sample.token_rewards.tolist(),
        "finish_reason": sample.finish_reason,
        "token_ids": sample.token_ids.tolist(),
        "logprobs": [round(float(logprob), 6) for logprob in sample.logprobs],
        "loss_mask_runs": list(sample.mask_runs),
        "branches": [branch._asdict() for branch in sample.branches],
        "spans": [{"version": show(s.version), "step": s.step, "start": s.start, "end": s.end} for s in sample.spans],
    }
    if decoder is not None:
        record["text"] = decoder.decode(sample.token_ids)
    record["turns"] = told_of(sample, decoder.decode if decoder else None)
    return record


def _rows(entry: Entry, group: Group, decoder: TokenDecoder | None) -> Iterator[dict[str, Any]]:
    record = to_json(entry, group, decoder)
    group_columns = ("id", "ticket", "run_uid", "worker", "prompt_ids", "prompt")
    shared = {name: value for name, value in record.items() if name in group_columns}
    for at, (row, sample) in enumerate(zip(record["samples"], group.samples, strict=True)):
        rewards = list(sample.rewards.items())  # the entries of a map column
        del row["turns"]  # they follow from spans and branches
        yield {**shared, **row, "sample": at, "logprobs": sample.logprobs.tolist(), "rewards": rewards}


def _parquet_schema(pa: Any, *, with_text: bool) -> Any:
    span = pa.struct([("version", pa.string()), ("step", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
    fields = [
        ("id", pa.string()),
        ("ticket", pa.int64()),
        ("sample", pa.int32()),
        ("run_uid", pa.string()),
        ("worker", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("turn_rewards", pa.list_(pa.float64())),
        ("token_rewards", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask_runs", pa.list_(pa.int32())),
        ("spans", pa.list_(span)),
        ("branches", pa.list_(pa.struct([(name, pa.int32()) for name in ("start", "row", "keep")]))),
    ]
    text = [("prompt", pa.string()), ("text", pa.string())] if with_text else []
    return pa.schema([*fields, *text])
