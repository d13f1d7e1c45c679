"""What a version must pass before anything made under it is delivered: the read-back and the canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from streamrl.errors import LoadRejected
from streamrl.protocol.weights.format import DType
from streamrl.protocol.weights.manifest import Manifest
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.base import EngineSettings, Load
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.hf_model import token_logprobs
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.transformers_engine import TransformersEngine
from streamrl.workers.proofs.proving import Prover
from streamrl.workers.proofs.reference import Judged, Reference
from tests.tiny_models import make_model
from tests.weights_world import RUN_UID
from tests.worker_world import worker_config

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

IDS = tuple(range(3, 27))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Answers(EngineDouble):
    """Answers a canary by the truth, and as far from it as it is told."""

    def __init__(self, judged: Judged, *, off: float = 0.0) -> None:
        super().__init__()
        self.judged, self.off, self.num_canaries = judged, off, 0

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self.num_canaries += 1
        return (self.judged.truth + self.off).astype(np.float32)


def manifest(canary_ids: tuple[int, ...] = IDS) -> Manifest:
    return Manifest(
        version=make_version(6, 103), base=0, step=1, run_uid=RUN_UID, tensors=(), shards=(), canary_ids=canary_ids
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DType]:
    """(a tied model's folder, the dtype of its weights)"""
    dtype: DType = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), tied=True, dtype=getattr(torch, dtype))
    return folder, dtype


def reference_of(case: tuple[Path, DType]) -> Reference:
    folder, dtype = case
    return Reference(read_model(str(folder), trust_remote_code=False), dtype=dtype)


def prover_of(case: tuple[Path, DType], progress: Progress | None = None, clock: Clock | None = None) -> Prover:
    folder, dtype = case
    return Prover(
        model=read_model(str(folder), trust_remote_code=False),
        dtype=dtype,
        progress=progress or Progress(part="worker/0", role="worker"),
        clock=clock or Clock(),
    )


def test_the_reference_answers_as_the_folders_own_model_and_keeps_no_weights(case: tuple[Path, DType]) -> None:
    folder, dtype = case
    wide = {"float32": torch.float64, "bfloat16": torch.float32}[dtype]
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=wide).eval()
    reference = reference_of(case)
    for _ in range(2):
        judged = reference.judge(folder / "model.safetensors", IDS)
        assert judged.truth.tolist() == pytest.approx(token_logprobs(own, list(IDS)), abs=1e-6)
    assert 0 < judged.rounding < {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert all(parameter.is_meta for shell in reference._shells.values() for parameter in shell.model.parameters())


async def test_an_engine_within_the_rounding_is_believed_and_both_figures_are_told(case: tuple[Path, DType]) -> None:
    mirror = case[0] / "model.safetensors"
    judged = reference_of(case).judge(mirror, IDS)
    progress = Progress(part="worker/0", role="worker")
    await prover_of(case, progress).check(Answers(judged, off=2 * judged.rounding), mirror, manifest())
    told = progress.report().detail
    assert told["rounding"] == pytest.approx(judged.rounding)
    assert told["engine_off"] == pytest.approx(2 * judged.rounding, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("off", [0.5, float("nan")])
async def test_an_engine_beyond_the_rounding_is_refused_with_both_figures(case: tuple[Path, DType], off: float) -> None:
    mirror = case[0] / "model.safetensors"
    judged = reference_of(case).judge(mirror, IDS)
    with pytest.raises(LoadRejected, match=rf"version 6\.103.* are {off:.3g} away.*is allowed"):
        await prover_of(case).check(Answers(judged, off=off), mirror, manifest())


async def test_what_is_read_back_wrong_is_refused_by_name(case: tuple[Path, DType]) -> None:
    engine = EngineDouble()
    engine.wrong = ("model.norm.weight",)
    with pytest.raises(LoadRejected, match=r"version 6\.103: 1 of the 1 tensors.*model\.norm\.weight"):
        await prover_of(case).check(engine, case[0] / "model.safetensors", manifest(()))


async def test_all_is_read_back_at_an_engines_first_load_and_a_part_at_each_later_one(case: tuple[Path, DType]) -> None:
    engine, prover, mirror = EngineDouble(), prover_of(case), case[0] / "model.safetensors"
    for _ in range(2):
        await prover.rehearse(engine, mirror)
        await prover.check(engine, mirror, manifest(()))
        await prover.check(engine, mirror, manifest(()))
    assert engine.num_decoys == 2
    assert engine.read_parts == [1, 8, 1, 8]


async def test_an_engine_that_was_refused_is_read_back_as_a_whole_until_it_passes(case: tuple[Path, DType]) -> None:
    engine, prover, mirror = EngineDouble(), prover_of(case), case[0] / "model.safetensors"
    await prover.check(engine, mirror, manifest(()))
    engine.wrong = ("model.norm.weight",)
    for _ in range(2):
        with pytest.raises(LoadRejected):
            await prover.check(engine, mirror, manifest(()))
    engine.wrong = ()
    await prover.check(engine, mirror, manifest(()))
    await prover.check(engine, mirror, manifest(()))
    assert engine.read_parts == [1, 8, 1, 1, 8]


async def test_canaries_take_a_small_share_of_the_time(case: tuple[Path, DType]) -> None:
    mirror, clock = case[0] / "model.safetensors", Clock()
    engine, prover = Answers(reference_of(case).judge(mirror, IDS)), prover_of(case, clock=clock)
    answer = engine.logprobs

    async def slow(token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        clock.now += 1.0
        return await answer(token_ids)

    engine.logprobs = slow  # type: ignore[method-assign]  # it takes a second
    for _ in range(100):
        await prover.check(engine, mirror, manifest())
        clock.now += 1.0
    assert engine.num_canaries == 2


@contextmanager
def changed(folder: Path, name: str, change: torch.Tensor) -> Iterator[Path]:
    """The folder's weights with one tensor changed."""
    weights = load_file(folder / "model.safetensors")
    path = folder / "changed.safetensors"
    save_file({**weights, name: change.to(weights[name].dtype)}, path)
    yield path
    path.unlink()


async def test_every_tensor_that_differs_is_found_by_reading_back(case: tuple[Path, DType]) -> None:
    folder, dtype = case
    mirror = folder / "model.safetensors"
    config = worker_config(threads=1).model_copy()
    settings = EngineSettings(
        model=read_model(str(folder), trust_remote_code=False),
        config=config.model_copy(update={"weights": config.weights.model_copy(update={"dtype": dtype})}),
        seed=1,
    )
    engine = TransformersEngine(settings)
    await engine.start()
    try:
        await engine.load_decoy(mirror)
        found = await engine.read_back(mirror, number=1, num_parts=1)
        assert len(found.wrong) == found.num_read
        await engine.load(Load(weights=mirror, version=1, step=0))
        assert not (await engine.read_back(mirror, number=2, num_parts=1)).wrong
        for name, weight in load_file(mirror).items():
            with changed(folder, name, weight * 1.01 + 0.01) as path:
                found = await engine.read_back(path, number=3, num_parts=1)
            assert found.wrong == (name,)
        by_parts = [await engine.read_back(mirror, number=number, num_parts=4) for number in range(4)]
        assert sum(part.num_read for part in by_parts) == found.num_read
    finally:
        await engine.stop()
