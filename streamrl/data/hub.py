"""Datasets of a hub or a folder, read with the library `datasets`: each row as the line that a JSONL file would hold.

The library downloads what is not cached, checks it, and returns rows in the order of the dataset's files. Blocks on the
network the first time. It runs no code of the dataset.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from streamrl.data.dataset import Dataset, named_in, no_column
from streamrl.errors import DataError
from streamrl.extras import need

_BATCH = 1000


def hub_lines(dataset: Dataset, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield (row number from 1, row as JSON); `key` is the setting that names the dataset, for errors."""
    need(f"{key} = {dataset.hub!r}", "datasets", extra="hub")
    loaded = _load(dataset, key)
    columns = _columns(dataset, loaded.column_names, key)
    # In Arrow's format, which decodes nothing, so that pictures do not require Pillow.
    batches = loaded.select_columns(columns).with_format("arrow").iter(_BATCH)
    rows = (row for batch in batches for row in batch.to_pylist())
    features = loaded.features
    yield from ((number, _encode(row, features, dataset, key)) for number, row in enumerate(rows, start=1))


def _load(dataset: Dataset, key: str) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    assert dataset.hub is not None, "the caller has checked it"
    cache = _cache_of(Path(dataset.hub), Path(datasets.config.HF_DATASETS_CACHE))
    try:
        return datasets.load_dataset(
            dataset.hub, dataset.name, split=dataset.split, revision=dataset.revision, cache_dir=str(cache)
        )
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{key} = {dataset.hub!r}: there is no such folder, and on the hub: {_first_line(error)}"
        ) from None
    except ConnectionError as error:
        remedy = "download it once on a machine with network access into HF_HOME, or set hub to a local folder"
        raise DataError(f"{key} = {dataset.hub!r} cannot be fetched: {_first_line(error)}; {remedy}") from None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:  # no such split or configuration
        raise DataError(f"{key} = {dataset.hub!r} cannot be loaded: {_first_line(error)}") from None


def _cache_of(folder: Path, cache: Path) -> Path:
    """Return the cache for the folder's current state: if a folder has a dataset card, the library does not notice that
    its files have changed."""
    if not folder.is_dir():
        return cache
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder)))
    states = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return cache / "folders" / xxhash.xxh3_64_hexdigest(repr(states).encode())


def _is_hidden(file: Path) -> bool:
    """Whether the library ignores it too: .git, .cache."""
    return any(part.startswith(".") for part in file.parts)


def _first_line(error: Exception) -> str:
    """Shorten a message that may go on with how to call the library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__


def _columns(dataset: Dataset, there: Sequence[str], key: str) -> list[str]:
    """Return the needed columns, in their order."""
    wanted = [] if dataset.prompt is None else named_in(dataset.prompt)
    missing = [name for name in (*wanted, *(dataset.fields or {}).values()) if name not in there]
    if missing:
        raise DataError(f"{key}: {dataset.place} has {no_column(missing[0], there, prompt=dataset.prompt)}")
    return [name for name in there if dataset.columns is None or name in dataset.columns]


def _encode(row: Mapping[str, Any], features: Mapping[str, Any], dataset: Dataset, key: str) -> bytes:
    plain = {name: _plain(value, features[name]) for name, value in row.items()}
    try:
        return json.dumps(plain, ensure_ascii=False).encode()
    except TypeError:
        name, value = next((name, value) for name, value in row.items() if not _is_json(value))
        raise DataError(
            f"{key}: column {name!r} of {dataset.place} holds a {type(value).__name__}, which is not "
            "JSON; list the columns that rewards need in `fields`, without this one"
        ) from None


def _plain(value: Any, feature: Any, *, in_list: bool = False) -> Any:
    """Return a value of Arrow's, whose type is `feature`, as it was written.

    Arrow gives every map in a list, such as a message or the arguments of its calls, all keys that any of them has:
    absent ones are dropped. What has no type in Arrow is kept there as JSON text.
    """
    if value is None:
        return None
    if isinstance(feature, Mapping):
        present = {name: one for name, one in value.items() if one is not None or not in_list}
        return {name: _plain(one, feature[name], in_list=in_list) for name, one in present.items()}
    if type(feature).__name__ == "Json":  # since datasets 5
        return json.loads(value)
    of_item = getattr(feature, "feature", None)
    return value if of_item is None else [_plain(one, of_item, in_list=True) for one in value]


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
