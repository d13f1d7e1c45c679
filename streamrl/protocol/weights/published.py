"""What a run has published, for people: read, checked against its digests, and written as a model's folder.

Nothing here writes to the run or needs its learner. A run goes on meanwhile: a version may be collected while it is
looked at, which is then an error that says so. Blocks on Redis and on the store, within their bounds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import DataError, WeightsError
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.fetching import fetch
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest import Manifest, ShardRecord, decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import PretrainedFiles
from streamrl.protocol.weights.stores import BlobStore
from streamrl.versions import show

if TYPE_CHECKING:
    import redis

    from streamrl.protocol.transport.keys import Keys

_PATIENCE_S = 5.0
_DIGITS = 20  # of the largest version, and one more
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", "consolidated*", "original")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    by_version: dict[int, Manifest]  # the oldest first
    unreadable: tuple[str, ...]  # versions, or what stands in their place


def read_manifests(client: redis.Redis, keys: Keys) -> Manifests:
    """One that cannot be read, of another program or version, hides no other."""
    read = partial(client.hgetall, keys.manifests)
    found: Any = repeat(client, "list versions", read, give_up_after_s=_PATIENCE_S)
    manifests, unreadable = {}, []
    for key, packed in found.items():
        try:
            manifests[int(key)] = decode_manifest(packed)
        except (ValueError, WeightsError):
            unreadable.append(show(int(key)) if key.isdigit() and len(key) < _DIGITS else key.decode(errors="replace"))
    return Manifests(by_version=dict(sorted(manifests.items())), unreadable=tuple(sorted(unreadable)))


def full_bytes(manifest: Manifest) -> int:
    """Of the model, as it is served."""
    return sum(tensor.num_bytes for tensor in manifest.served)


def changed_by_tensor(manifest: Manifest) -> dict[TensorMeta, int]:
    """Elements that differ from the base, the most changed tensor first."""
    changed = {tensor.name: 0 for tensor in manifest.tensors}
    for shard in manifest.shards:
        for part in shard.ranges:
            changed[part.tensor] += part.num_changed
    return dict(sorted(((t, changed[t.name]) for t in manifest.tensors), key=lambda pair: -pair[1]))


def check_blobs(manifest: Manifest, store: BlobStore) -> Iterator[tuple[ShardRecord, str | None]]:
    """Fetch each blob of the version and digest it again: with what is wrong, None where it is as the manifest says."""
    for shard in (*manifest.shards, *manifest.anchor):
        try:
            fetch(shard, store)
        except WeightsError as error:
            yield shard, str(error)
        else:
            yield shard, None


def pull(version: int, manifests: dict[int, Manifest], store: BlobStore, *, model: Path, folder: Path) -> None:
    """Write the version as a folder that transformers loads: weights from the store, all else from `model`; of
    adapters, which are merged, the weights that they are for, too.

    The folder appears whole: it is written beside and renamed. DataError when it is there already, or `model` is none.
    """
    if folder.exists():
        raise DataError(f"{folder} is there already: name a new folder")
    if not (model / "config.json").is_file():
        raise DataError(f"{model} is no folder of a model: it has no config.json; name the base model's with --model")
    target = manifests[version]
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(model, beside, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))
        files = sorted(model.glob("*.safetensors")) if target.adapters else []
        mirror = Mirror(beside, run_uid=target.run_uid, pretrained=PretrainedFiles(files, name=str(model)))
        mirror.apply_path(catch_up(0, target, manifests.get), store)
        assert mirror.version == version, "a path that was applied leads to its target"
        mirror.path.rename(beside / "model.safetensors")
        _say_dtype(beside / "config.json", target)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _say_dtype(path: Path, manifest: Manifest) -> None:
    """The base model's configuration names the dtype in which it was published itself."""
    told = json.loads(path.read_text())
    [dtype, *others] = {tensor.dtype for tensor in manifest.tensors}
    if not others:
        told.pop("torch_dtype", None)
        told["dtype"] = dtype
    path.write_text(json.dumps({**told, "streamrl_version": show(manifest.version)}, indent=2) + "\n")
