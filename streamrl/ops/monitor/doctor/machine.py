"""Checks of this machine and the run's model: the model's folder, memory, shared memory, disk, limits.

Resource needs are estimated from the model, whose parts must be consistent. Only headers and JSON are read; no tensor
is loaded, and no code of a model runs.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.config.load import Loaded
from streamrl.config.placement import StartedPart, num_ranks, num_workers
from streamrl.config.schema import Config
from streamrl.files import first_there
from streamrl.finding import Finding, error, ok, warning
from streamrl.gpus import gpus_here
from streamrl.host import available_memory, computes_in_bfloat16
from streamrl.misfits import misfits, version
from streamrl.ops.monitor.doctor.sizes import (
    BYTES,
    count_parameters,
    published_bytes,
    served_bytes,
    trained_parameters,
)
from streamrl.protocol.weights.stores import folder_of, needed_bytes
from streamrl.terminal import size

_MASTER_BYTES = 4 + 4 + 8  # fp32 weights, gradients, and AdamW's two moments
_CHECKPOINT_BYTES = 4 + 8  # fp32 weights and the moments
_MIN_OPEN_FILES = 4096


def check_torch(loaded: Loaded) -> Iterator[Finding]:
    """Warn about packages built for another torch, which break other programs that import transformers."""
    for name, mismatch in misfits().items():
        remedy = f"`pip uninstall {name}`; streamrl does not use it"
        yield warning("torch", f"{mismatch}: streamrl ignores it", remedy)
    if not misfits():
        yield ok("torch", version("torch") or "not installed")


def check_models(loaded: Loaded) -> Iterator[Finding]:
    config = loaded.config
    yield from _check_model("model", config.model.path, key="model.path")
    if config.reward_server is not None:
        yield from _check_model("reward model", config.reward_server.model, key="reward_server.model")


def _check_model(name: str, path: str, *, key: str) -> Iterator[Finding]:
    folder = Path(path)
    if not folder.is_dir():
        yield warning(name, f"{path} is not a local folder; models on a hub are not checked", "give a local folder")
        return
    settings = _read_json(folder / "config.json")
    settings = settings.get("text_config", settings)
    count = count_parameters(folder)
    num_parameters = (
        f"{count / 1e6:,.1f} million parameters" if count else "no safetensors files to count parameters in"
    )
    yield ok(name, f"{settings.get('model_type', 'unknown type')}, {num_parameters}")
    yield from _check_vocabulary(name, folder, settings, key=key)


def _check_vocabulary(name: str, folder: Path, settings: dict[str, Any], *, key: str) -> Iterator[Finding]:
    tokenizer, outputs = _read_json(folder / "tokenizer.json"), settings.get("vocab_size")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece[0]: at for at, piece in enumerate(vocabulary)}
    ids = {**pieces, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}}
    if not ids or not isinstance(outputs, int):
        yield warning(f"{name} vocabulary", "no tokenizer.json to compare with", "the learner compares when it starts")
        return
    end_token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    end_token = end_token.get("content") if isinstance(end_token, dict) else end_token
    highest, highest_of_all = max((*pieces.values(), ids.get(end_token, 0))), max(ids.values())
    if highest >= outputs:
        yield error(
            f"{name} vocabulary",
            f"{key} = {str(folder)!r}: the tokenizer has ids up to {highest}, the model only {outputs} outputs",
            "use the tokenizer of this model; if tokens were added to it, resize the model's embeddings",
        )
        return
    if highest_of_all >= outputs:  # as where the tokenizer is also that of larger models, which read images
        yield warning(
            f"{name} vocabulary",
            f"{key} = {str(folder)!r}: added tokens have ids up to {highest_of_all}, the model only {outputs} outputs",
            "leave these tokens out of prompts and templates, or resize the model's embeddings",
        )
    else:
        yield ok(f"{name} vocabulary", f"{len(ids)} tokens, {outputs} outputs")
    if name == "model" and end_token is not None and end_token not in ids:
        seen = f"{key} = {str(folder)!r}: eos_token {end_token!r} is not in the vocabulary"
        yield error(f"{name} end token", seen, "fix tokenizer_config.json")


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if it is missing or malformed, which `check_files` reports."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_precision(loaded: Loaded) -> Iterator[Finding]:
    """Check the cores only: every supported GPU has bfloat16."""
    dtypes = {"model.dtype": loaded.config.model.dtype, "weights.dtype": loaded.config.weights.dtype}
    slow = [f"{key}: float32" for key, dtype in dtypes.items() if dtype == "bfloat16"]
    if slow and not gpus_here() and not computes_in_bfloat16():
        seen = "this CPU has no bfloat16 arithmetic (AVX512_BF16 or AMX), and converts each value to float32 and back"
        yield warning("precision", seen, f"set {' and '.join(slow)}")


def learner_bytes(config: Config, parameters: int) -> int:
    """Estimate one rank's memory, without activations but with logits, which outweigh them for small models."""
    ranks = config.learner.processes
    trained = parameters * _MASTER_BYTES // ranks
    copies = 1 if config.algorithm.kl_in == "none" or config.model.lora is not None else 2  # and the reference
    forward = copies * parameters * BYTES[config.model.dtype] // ranks
    return trained + forward


def worker_bytes(config: Config) -> int:
    """Estimate a worker's memory without GPUs and without KV cache: the engine, and its mirror in shared memory."""
    return 2 * served_bytes(config)


def check_memory(loaded: Loaded, part: StartedPart = "all") -> Iterator[Finding]:
    config = loaded.config
    workers, ranks = num_workers(config, part), num_ranks(config, part)
    parameters, engine = count_parameters(Path(config.model.path)), served_bytes(config)
    if not parameters:
        yield warning("memory", "the model's size is unknown", "set model.path to a local folder")
        return
    learner = learner_bytes(config, parameters)
    if gpus_here():  # reported by the placement check, and by the learner's own trial
        return
    if part != "worker":
        yield ok("learner memory", f"about {size(learner)} per rank, plus activations (an estimate)")
    if part != "learner":
        yield ok("worker memory", f"about {size(engine)} per worker, plus its KV cache (an estimate)")
    free = available_memory()
    needed = ranks * learner + workers * worker_bytes(config)
    estimate = f"about {size(needed)} needed on this machine, {size(free)} free"
    if needed > free:
        yield error("memory", estimate, "use a smaller model, LoRA, fewer workers, or a machine with more")
    elif needed > 0.6 * free:
        yield warning("memory", estimate, "activations and KV cache come on top: lower training.micro_batch_tokens")
    else:
        yield ok("memory", estimate)


def check_shared_memory(loaded: Loaded, part: StartedPart = "all") -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield warning(
            "shared memory",
            "there is no /dev/shm",
            "mount one; without it workers use temporary files, which are slower",
        )
        return
    config = loaded.config
    needed = num_workers(config, part) * served_bytes(config)
    remedy = "enlarge /dev/shm (docker run --shm-size, or an emptyDir with medium: Memory)"
    yield _has_room("shared memory", folder, needed, what="the workers' mirrors of the weights", remedy=remedy)


def check_disk(loaded: Loaded) -> Iterator[Finding]:
    config = loaded.config
    folder = first_there(config.folder)
    keep = config.checkpoint.keep_last + config.checkpoint.keep_best + 1  # one is being written
    needed = keep * trained_parameters(config) * _CHECKPOINT_BYTES
    remedy = "make room, choose another `dir`, or lower checkpoint.keep_last and keep_best"
    begun = (config.folder / "run.json").exists()  # it has some of that already, and needs less
    yield _has_room("disk", folder, needed, what=f"{keep} checkpoints", remedy=remedy, may_have_some=begun)
    if (store := folder_of(config.weights.store)) is not None:
        needed = needed_bytes(published_bytes(config), config.weights)
        remedy = "make room, or choose another weights.store"
        found = first_there(store)
        yield _has_room("weights disk", found, needed, what="the weights", remedy=remedy, may_have_some=begun)


def _has_room(name: str, folder: Path, needed: int, *, what: str, remedy: str, may_have_some: bool = False) -> Finding:
    free = shutil.disk_usage(folder).free
    seen = f"{size(free)} free at {folder}, about {size(needed)} for {what}"
    if needed <= free:
        return ok(name, seen)
    return (
        warning(name, f"{seen}, which the run may have in part", remedy) if may_have_some else error(name, seen, remedy)
    )


def check_limits(loaded: Loaded) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"at most {soft} open files (hard limit {hard})"
    if soft < _MIN_OPEN_FILES:
        yield warning("limits", seen, f"run `ulimit -n {_MIN_OPEN_FILES}` before a run with many workers")
    else:
        yield ok("limits", seen)
