"""A pretrained model through the worker's proofs: hundreds of versions on real vLLM, and the cost of the proofs.

    AdamW at lr 1e-5 ─► Publisher, its cast proved ─► mirror ─► vLLM: loaded, read back, canary ─► again

The model is the one that `make demo` extracts from a package. Here every version has its canary; a worker skips some,
to spend at most 2 % of its time on them. The training tokens are random, so the model gets worse; what matters is that
its weights move as far as in real training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.learner_side import Announced, LearnerSide
from bench.measure import Say, seconds
from bench.report import Bar, Fact, Line
from bench.resume import Done
from streamrl.config import schema
from streamrl.errors import LoadRejected
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.background import BackgroundThreadDouble
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineSettings, Load
from streamrl.workers.engines.model import ModelFacts, read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.proofs.proving import Prover

MODEL = Path("runs/models/SmolLM2-135M-Instruct")
_NUM_VERSIONS = 500
_STEP_ROWS, _STEP_LENGTH = 48, 56  # tokens of a step of the demo, prompts included
_UPDATE_TOKENS = 32  # of the steps between versions
_NUM_CANARY_TOKENS = 64
_RESULT = "pretrained"


@dataclass(slots=True)
class _Found:
    start_s: float = math.nan  # from an engine's start to its first version
    proofs_s: float = math.nan  # the proofs' part of it
    step_s: float = math.nan  # of the learner, in bf16
    cast_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    check_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # the engine's distance from the truth, relative to the rounding
    alarms: list[str] = field(default_factory=list)


def bench_pretrained(done: Done, *, quick: bool, say: Say) -> list[Line]:
    """Measure, or return the kept result; without the model, lines that are not finite."""
    num_versions = 5 if quick else _NUM_VERSIONS
    found = _Found(**done[_RESULT]) if _RESULT in done else _Found()
    if _RESULT not in done and MODEL.is_dir():
        asyncio.run(_prove_versions(num_versions, found, say))
        done.add(_RESULT, asdict(found))
    step_share = float(np.median(found.cast_s)) / found.step_s if found.cast_s else math.nan
    alarms = float(len(found.alarms)) if len(found.check_s) == num_versions else math.nan
    return [
        Bar(name=f"SmolLM2-135M, bf16: false alarms in {num_versions} versions", value=alarms, unit="", goal=0,
            better="lower"),
        Bar(name="SmolLM2-135M: the learner's loop waits for proofs, of a step", value=100 * step_share, unit="%",
            goal=1, better="lower"),
        Bar(name="SmolLM2-135M: a worker's start is longer with proofs", value=100 * found.proofs_s / found.start_s,
            unit="%", goal=15, better="lower"),
        *_facts(found),
    ]  # fmt: skip


def _facts(found: _Found) -> list[Line]:
    figures: dict[str, tuple[Sequence[float], str]] = {
        "engine / rounding, worst": ([max(found.ratios, default=math.nan)], "x"),
        "engine / rounding, median": (found.ratios, "x"),
        "load": (found.load_s, "s"),
        "read-back of an eighth, and a canary": (found.check_s, "s"),
        "cast and its digests": (found.cast_s, "s"),
        f"learner step of {_STEP_ROWS} x {_STEP_LENGTH} tokens, bf16": ([found.step_s], "s"),
        "engine's start to its first version": ([found.start_s], "s"),
        "rehearsal and first proof": ([found.proofs_s], "s"),
    }
    return [
        Fact(name=f"SmolLM2-135M: {name}", value=float(np.median(values)), unit=unit)
        for name, (values, unit) in figures.items()
        if len(values)
    ]


async def _prove_versions(num_versions: int, found: _Found, say: Say) -> None:
    config, facts = _config(), read_model(str(MODEL), trust_remote_code=False)
    announced, store = Announced(), MemoryStore()
    learner = LearnerSide(
        config,
        store=store,
        announcer=announced,
        background=BackgroundThreadDouble(),
        num_tokens=_UPDATE_TOKENS,
        lr=1e-5,
    )
    found.step_s = learner.measure_step(rows=_STEP_ROWS, length=_STEP_LENGTH)
    progress = Progress(part="worker/0", role="worker")
    prover = Prover(
        model=facts,
        dtype=config.weights.dtype,
        progress=progress,
        clock=lambda: 0.0,  # makes a canary take no time, so that each version gets one
    )
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    with scratch_folder() as folder:
        mirror = Mirror(folder / "mirror")
        learner.publish()
        mirror.apply(announced.manifests[-1], store)
        try:
            await _start(engine, prover, mirror, _with_canary(announced.manifests[-1], facts), found, say)
            for number in range(num_versions):
                if number % 10 == 0:
                    say(f"version {number + 1} of {num_versions}, {len(found.alarms)} alarms")
                learner.train()
                found.cast_s.append(seconds(lambda: learner.cast_digests(config.weights.dtype)))
                learner.publish()
                mirror.apply(announced.manifests[-1], store)
                await _prove(engine, prover, mirror, _with_canary(announced.manifests[-1], facts), found)
                detail = progress.report().detail
                found.ratios.append(float(detail["engine_off"]) / float(detail["rounding"]))
        finally:
            await engine.stop()
            mirror.close()


async def _start(
    engine: VllmEngine, prover: Prover, mirror: Mirror, manifest: Manifest, found: _Found, say: Say
) -> None:
    """Time an engine's start to its first version, with the proofs' share."""
    say("starting vLLM")
    began = time.perf_counter()
    await engine.start()
    started = time.perf_counter()
    await prover.rehearse(engine, mirror.path)
    rehearsed = time.perf_counter()
    await engine.load(Load(weights=mirror.path, version=manifest.version, step=0))
    loaded = time.perf_counter()
    await prover.check(engine, mirror.path, manifest)
    found.proofs_s = rehearsed - started + time.perf_counter() - loaded
    found.start_s = loaded - began - (rehearsed - started)


async def _prove(engine: VllmEngine, prover: Prover, mirror: Mirror, manifest: Manifest, found: _Found) -> None:
    began = time.perf_counter()
    await engine.load(Load(weights=mirror.path, version=manifest.version, step=manifest.step))
    loaded = time.perf_counter()
    try:
        await prover.check(engine, mirror.path, manifest)
    except LoadRejected as error:
        found.alarms.append(str(error))
    found.load_s.append(loaded - began)
    found.check_s.append(time.perf_counter() - loaded)


def _with_canary(manifest: Manifest, facts: ModelFacts) -> Manifest:
    """Add canary tokens, since the bench's learner has no prompts: a text in the model's chat format."""
    text = "What is 3 + 4 - 5? Think of the numbers one after the other, and then say what comes out. " * 4
    chat = facts.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    return replace(manifest, canary_ids=tuple(facts.tokenizer.encode(chat))[:_NUM_CANARY_TOKENS])


def _config() -> schema.Config:
    return schema.Config(
        name="bench",
        model=schema.Model(path=str(MODEL), dtype="float32"),
        data=schema.Data(train="unused.jsonl", max_prompt_tokens=128),
        sampling=schema.Sampling(num_samples=4, max_tokens=128),
        rewards={"unused": schema.FunctionReward(type="function", target="unused")},
        weights=schema.Weights(dtype="bfloat16"),
        worker=schema.Worker(threads=1, max_groups_in_flight=4, engine_args={"kv_cache_memory_bytes": 256 << 20}),
    )
