"""Published versions of a run, for people: read, checked against their digests, and written as a model folder.

Nothing here writes to the run or needs its learner. The run continues meanwhile: a version may be deleted while it is
read, which raises an error that says so. Blocks on Redis and on the store, within their timeouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.errors import DataError, WeightsError
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.fetching import fetch
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import Pretrained, PretrainedFiles
from streamrl.protocol.weights.stores import BlobStore
from streamrl.versions import show

if TYPE_CHECKING:
    import redis

    from streamrl.protocol.transport.keys import Keys

_PATIENCE_S = 5.0
_DIGITS = 20  # one more than the largest version has
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", "consolidated*", "original")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    by_version: dict[int, Manifest]  # the oldest first
    unreadable: tuple[str, ...]  # versions, or the keys in their place


def read_manifests(client: redis.Redis, keys: Keys) -> Manifests:
    """Read all manifests; an unreadable one (of another program or version) does not hide the others."""
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
    """Size of the model as it is served."""
    return sum(tensor.num_bytes for tensor in manifest.served)


def changed_by_tensor(manifest: Manifest) -> dict[TensorMeta, int]:
    """Count the elements that differ from the base, the most changed tensor first."""
    changed = {tensor.name: 0 for tensor in manifest.tensors}
    for shard in manifest.shards:
        for part in shard.ranges:
            changed[part.tensor] += part.num_changed
    return dict(sorted(((t, changed[t.name]) for t in manifest.tensors), key=lambda pair: -pair[1]))


def check_blobs(manifest: Manifest, store: BlobStore) -> Iterator[tuple[ShardRecord, str | None]]:
    """Fetch and verify each blob of the version; yield it with the error, or None if it matches the manifest."""
    for shard in (*manifest.shards, *manifest.anchor):
        try:
            fetch(shard, store)
        except WeightsError as error:
            yield shard, str(error)
        else:
            yield shard, None


class Converts(Protocol):
    """Knows models whose files name tensors otherwise than the learner does, or stack them otherwise."""

    def pretrained(self, model: Path) -> Pretrained:
        """Return the model's tensors under the learner's names."""
        ...

    def write(self, weights: Path, folder: Path, *, model: Path) -> None:
        """Write the file's tensors and the configuration into the folder, in the layout of the model's files."""


def pull(
    version: int,
    manifests: dict[int, Manifest],
    store: BlobStore,
    *,
    model: Path,
    folder: Path,
    other_names: Converts,  # called only if the files of `model` have not all tensors under the learner's names
) -> None:
    """Write the version as a folder that transformers loads: weights from the store, all other files from `model`.

    Adapters are merged into the weights of `model`. The folder appears whole: it is written under another name and
    renamed. DataError when it exists already, or `model` is not a model folder.
    """
    if folder.exists():
        raise DataError(f"{folder} already exists: choose a new folder")
    if not (model / "config.json").is_file():
        raise DataError(
            f"{model} is not a model's folder: it has no config.json; pass the base model's folder with --model"
        )
    target = manifests[version]
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(model, beside, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))
        files = PretrainedFiles(sorted(model.glob("*.safetensors")), name=str(model))
        is_named_alike = all(tensor in files for tensor in target.served)
        pretrained = other_names.pretrained(model) if target.adapters and not is_named_alike else files
        mirror = Mirror(beside, run_uid=target.run_uid, pretrained=pretrained)
        mirror.apply_path(catch_up(0, target, manifests.get), store)
        assert mirror.version == version, "a path that was applied leads to its target"
        if is_named_alike:
            _rename_for_all(mirror.path, beside / "model.safetensors")
        else:
            other_names.write(mirror.path, beside, model=model)
            mirror.close()
        _set_dtype(beside / "config.json", target)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _rename_for_all(path: Path, name: Path) -> None:
    """Rename, with the mode of any new file: a mirror is its user's alone."""
    name.touch()
    path.chmod(name.stat().st_mode)
    path.rename(name)


def _set_dtype(path: Path, manifest: Manifest) -> None:
    """Set the published dtype: the base model's config.json names the dtype, or quantization, of its own release."""
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    [dtype, *others] = {tensor.dtype for tensor in manifest.tensors}
    if not others:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    path.write_text(json.dumps({**config, "streamrl_version": show(manifest.version)}, indent=2) + "\n")
