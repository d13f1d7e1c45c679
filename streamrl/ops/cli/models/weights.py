"""`streamrl weights ls|show|verify|pull`: the published versions of a live run. `export`: a checkpoint of any run, as a
model. Reads only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from streamrl.errors import ConfigError, DataError
from streamrl.extras import need
from streamrl.ops.cli.arguments import OpenRun, open_run, print_result, takes_json, takes_run
from streamrl.ops.cli.models.subject import find_subject, takes_base
from streamrl.ops.monitor.runs import Target
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.pretrained import Pretrained
from streamrl.protocol.weights.published import Manifests, changed_by_tensor, check_blobs, full_bytes, read_manifests
from streamrl.protocol.weights.published import pull as pull_version
from streamrl.protocol.weights.stores import BlobStore, open_store
from streamrl.versions import parse, show

_NUM_TENSORS_SHOWN = 10
_REMEDY = (
    "`streamrl weights export {folder} --to FOLDER` writes its newest checkpoint as a model, and if it has finished, "
    "{folder}/export is one"
)
_LATEST = "latest"
_UNREADABLE = "its manifest cannot be read"

_version = click.option(
    "--version", "wanted", default=_LATEST, metavar="TERM.NUMBER", help="Version, as `weights ls` shows it."
)


@click.group()
def weights() -> None:
    """List, check or export the weights of a run.

    All but `export` are about versions that a live run has published. A version is a delta against the previous one, an
    anchor (all weights), or a delta with an anchor beside it. The last two anchors and what builds on them are kept.
    """


@contextmanager
def _published(target: Target) -> Iterator[tuple[OpenRun, Manifests]]:
    with open_run(target, remedy=_REMEDY) as opened:
        yield opened, read_manifests(opened.client, opened.keys)


def _store(opened: OpenRun) -> BlobStore:
    return open_store(opened.config.weights.store, opened.client, opened.keys)


def _served_by(opened: OpenRun) -> Mapping[int, list[str]]:
    """Map each version to the workers that serve it."""
    served_by = defaultdict(list)
    for report in opened.reports:
        version = report.detail.get("version")
        if report.role == "worker" and isinstance(version, int):
            served_by[version].append(report.part.partition("/")[2])
    return served_by


def _pick(manifests: Mapping[int, Manifest], wanted: str) -> Manifest:
    if not manifests:
        raise DataError("the run has published no weights yet")
    oldest, newest = min(manifests), max(manifests)
    try:
        version = newest if wanted == _LATEST else parse(wanted)
    except ValueError as error:
        raise ConfigError(f"--version: {error}; or {_LATEST}") from None
    if version not in manifests:
        raise DataError(
            f"version {wanted} does not exist or was deleted; the oldest is {show(oldest)}, the newest {show(newest)}"
        )
    return manifests[version]


@weights.command()
@takes_run
@takes_json
def ls(target: Target, as_json: bool) -> None:
    """List the kept versions, oldest first, and which workers serve each.

    RATIO is the size of the whole model over that of what a worker fetches: the delta if it is up to date, an anchor
    and the deltas after it if it is late. In JSON, versions with unreadable manifests come last, with the kind
    `unreadable`.
    """
    with _published(target) as (opened, manifests):
        served_by = _served_by(opened)
    rows = [_row(manifest, served_by) for manifest in manifests.by_version.values()]
    unreadable = [_unreadable_row(name) for name in manifests.unreadable]
    print_result([*rows, *unreadable], _table(rows, manifests, served_by), as_json=as_json)


def _table(
    rows: Sequence[Mapping[str, Any]], manifests: Manifests, served_by: Mapping[int, list[str]]
) -> Iterator[str]:
    yield f"{'VERSION':>10}  {'STEP':>7}  {'KIND':<14}  {'BYTES':>15}  {'RATIO':>7}  SERVED BY"
    for row in rows:
        sizes = f"{row['bytes']:>15,}  {row['ratio']:>7,.1f}"
        served = ", ".join(row["served_by"])
        yield f"{row['version']:>10}  {row['step']:>7}  {row['kind']:<14}  {sizes}  {served}".rstrip()
    yield from (f"{name:>10}  {_UNREADABLE}" for name in manifests.unreadable)
    for version, workers in sorted(served_by.items()):
        if version not in manifests.by_version:
            yield f"{show(version):>10}  deleted, but still served by {', '.join(workers)}"


@weights.command("show")
@takes_run
@_version
@takes_json
def show_version(target: Target, wanted: str, as_json: bool) -> None:
    """Describe one version: its blobs, and which tensors changed most."""
    with _published(target) as (opened, manifests):
        manifest = _pick(manifests.by_version, wanted)
    row = _row(manifest, _served_by(opened)) | {
        "run_uid": manifest.run_uid,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "elements": t.num_elements, "changed": count}
            for t, count in changed_by_tensor(manifest).items()
        ],
        "blobs": [{"name": s.blob_name, "bytes": s.num_bytes, "digest": s.digest.hex()} for s in manifest.shards],
        "anchor_blobs": [{"name": s.blob_name, "bytes": s.num_bytes} for s in manifest.anchor],
        "canary_tokens": len(manifest.canary_ids),
    }
    print_result(row, _version_lines(row), as_json=as_json)


def _version_lines(row: Mapping[str, Any]) -> Iterator[str]:
    base = f" on {row['base']}" if row["base"] else ""
    yield f"version {row['version']}, after step {row['step']}: {row['kind']}{base}, of run {row['run_uid']}"
    served = ", ".join(row["served_by"]) or "no worker"
    yield f"  {row['bytes']:,} bytes, {row['ratio']:,.1f} times smaller than the model; served by {served}"
    yield from (f"  {blob['bytes']:>15,}  {blob['name']}" for blob in [*row["blobs"], *row["anchor_blobs"]])
    yield f"  most changed of {len(row['tensors'])} tensors:"
    for tensor in row["tensors"][:_NUM_TENSORS_SHOWN]:
        share = 100 * tensor["changed"] / max(1, tensor["elements"])
        yield f"  {share:>14.3f}%  {tensor['name']} {tensor['dtype']} {tensor['shape']}"


@weights.command()
@takes_run
@click.option("--version", "wanted", metavar="TERM.NUMBER", help="Only this version, or `latest`; default: all.")
@takes_json
def verify(target: Target, wanted: str | None, as_json: bool) -> int:
    """Fetch the blobs of all kept versions and compare them with the digests in the manifests.

    Exits with 0 if all match, with 1 if one is missing or damaged. Workers refuse such a blob anyway and use another
    path; the next anchor replaces a damaged one.
    """
    with _published(target) as (opened, manifests):
        chosen = [_pick(manifests.by_version, wanted)] if wanted else list(manifests.by_version.values())
        unreadable = () if wanted else manifests.unreadable
        store = _store(opened)
        checked = {manifest.version: list(check_blobs(manifest, store)) for manifest in chosen}
    blobs = [(show(version), *blob) for version, of_version in checked.items() for blob in of_version]
    faults = [{"version": version, "blob": shard.blob_name, "fault": fault} for version, shard, fault in blobs if fault]
    broken = [{"version": name, "blob": None, "fault": _UNREADABLE} for name in unreadable]
    result = {"versions": len(checked), "blobs": len(blobs), "faults": [*faults, *broken]}
    lines = [f"{fault['version']:>10}  {fault['blob']}: {fault['fault']}" for fault in faults]
    lines += [f"{name:>10}  {_UNREADABLE}" for name in unreadable]
    num_bytes = sum(shard.num_bytes for _, shard, _ in blobs)
    counts = f"{len(checked)} versions, {len(blobs)} blobs, {num_bytes:,} bytes: {len(faults)} missing or damaged"
    print_result(result, [*lines, counts], as_json=as_json)
    return 1 if faults or unreadable else 0


@weights.command()
@takes_run
@_version
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="The folder to create.")
@click.option("--model", type=click.Path(path_type=Path), help="The base model's folder; default: the run's.")
@takes_json
def pull(target: Target, wanted: str, to: Path, model: Path | None, as_json: bool) -> None:
    """Write one version as a Hugging Face folder.

    Configuration and tokenizer come from the base model's folder, the weights from the run's store, digests checked.
    Needs torch and transformers only for models whose files name tensors differently, such as mixtures of experts.

    \b
    streamrl weights pull runs/big --to big-newest
    streamrl weights pull --redis redis://host:6379 --run big --version 6.103 --model ./sft --to big-6.103
    """
    with _published(target) as (opened, manifests):
        manifest = _pick(manifests.by_version, wanted)
        base = model or Path(opened.config.model.path)
        by_version, store = manifests.by_version, _store(opened)
        pull_version(manifest.version, by_version, store, model=base, folder=to, other_names=OtherNames())
    version, step = show(manifest.version), manifest.step
    result = {"version": version, "step": step, "folder": str(to), "bytes": full_bytes(manifest)}
    print_result(result, [f"version {version}, after step {step}, is in {to}"], as_json=as_json, indent=None)


@weights.command()
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="The folder to create.")
@takes_base
@takes_json
def export(run: str, to: Path, model: str | None, as_json: bool) -> None:
    """Write a checkpoint as a Hugging Face folder. The run may go on, or have ended in any way.

    \b
    streamrl weights export runs/big --to big-newest
    streamrl weights export runs/big@best --to big-best         (@120: after step 120)

    Configuration and tokenizer come from the run's model.path, or from --model, the weights from the checkpoint, in
    weights.dtype, with adapters merged; those are also in FOLDER/adapter. Takes 4 bytes of memory for each weight.
    """
    subject = find_subject(run, base=model)
    if subject.checkpoint is None:
        raise ConfigError(f"{run} is a model already; name a run (RUN, RUN@STEP or RUN@best) or a checkpoint's folder")
    if to.exists():
        raise ConfigError(f"--to {to}: exists already; name a new folder")
    need("exporting", "torch", "transformers", extra="learner")
    click.echo(f"writing {subject.name} as a model", err=True)
    from streamrl.ops.cli.models.model_folder import write_folder

    write_folder(subject, to)
    step = subject.checkpoint.state.step
    result = {"step": step, "checkpoint": str(subject.checkpoint.folder), "folder": str(to)}
    print_result(result, [f"the model after step {step} is in {to}"], as_json=as_json, indent=None)


class OtherNames:
    """Implements `protocol.weights.published.Converts`."""

    def pretrained(self, model: Path) -> Pretrained:
        need("merging adapters into this model", "torch", "transformers", extra="learner")
        from streamrl.workers.weights.pretrained import PretrainedModel

        return PretrainedModel(str(model), trust_remote_code=False)

    def write(self, weights: Path, folder: Path, *, model: Path) -> None:
        need("writing this model", "torch", "transformers", extra="learner")
        from streamrl.learner.checkpoints.version_files import write_version

        write_version(weights, folder, model=model)


def _row(manifest: Manifest, served_by: Mapping[int, list[str]]) -> dict[str, Any]:
    kind = "anchor" if manifest.base == 0 else "delta + anchor" if manifest.anchor else "delta"
    model_bytes = full_bytes(manifest)
    return {
        "version": show(manifest.version),
        "step": manifest.step,
        "kind": kind,
        "base": show(manifest.base) if manifest.base else None,
        "bytes": manifest.num_bytes,
        "anchor_bytes": sum(shard.num_bytes for shard in manifest.anchor),
        "model_bytes": model_bytes,
        "ratio": model_bytes / max(1, manifest.num_bytes),
        "served_by": sorted(served_by.get(manifest.version, [])),
    }


def _unreadable_row(name: str) -> dict[str, Any]:
    """Return a row with the others' keys and unknown values."""
    unknown = dict.fromkeys(("step", "base", "bytes", "anchor_bytes", "model_bytes", "ratio"))
    return {"version": name, "kind": "unreadable", **unknown, "served_by": []}
