"""The canary and the probe: what they let pass, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from streamrl.errors import LoadRejected
from streamrl.versions import make_version
from streamrl.weights.format import DType, TensorMeta
from streamrl.weights.manifest import Canary, Manifest
from tests.tiny_models import make_model
from tests.weights_world import RUN_UID
from workers.engines.double import EngineDouble
from workers.engines.hf_model import build_model, load_weights, token_logprobs
from workers.model import read_model
from workers.probe import make_probe
from workers.proving import Prover

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

CANARY = Canary(token_ids=(3, 4, 5), logprobs=(-1.0, -2.0))


class Answers(EngineDouble):
    """Answers a canary as it is told."""

    def __init__(self, *, off: float = 0.0) -> None:
        super().__init__()
        self.off = off

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return np.asarray(CANARY.logprobs, dtype=np.float32) + np.float32(self.off)


def manifest(canary: Canary | None = CANARY) -> Manifest:
    return Manifest(version=make_version(6, 103), base=0, step=1, run_uid=RUN_UID, tensors=(), shards=(), canary=canary)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


async def ready(model: Path, engine: Answers, dtype: str = "float32") -> Prover:
    facts = read_model(str(model), trust_remote_code=False)
    prover = Prover(model=facts, dtype=dtype, trust_remote_code=False, with_probe=False)
    await prover.probe(engine, model / "model.safetensors", manifest())
    return prover


async def test_an_engine_that_agrees_with_the_learner_is_believed(model: Path) -> None:
    engine = Answers(off=5e-5)
    prover = await ready(model, engine)
    await prover.check(engine, manifest())
    await prover.check(engine, manifest())


@pytest.mark.parametrize(("dtype", "first", "then"), [("float32", 1e-6, 2e-4), ("bfloat16", 0.03, 0.3)])
async def test_an_engine_that_drifts_from_the_learner_is_refused_with_both_figures(
    model: Path, dtype: str, first: float, then: float
) -> None:
    engine = Answers(off=first)
    prover = await ready(model, engine, dtype)
    await prover.check(engine, manifest())
    engine.off = then
    with pytest.raises(LoadRejected, match=rf"version 6\.103.*{then:.3g}.*is let pass"):
        await prover.check(engine, manifest())


async def test_the_band_is_as_wide_as_the_engines_own_arithmetic_asks_for(model: Path) -> None:
    engine = Answers(off=1e-3)
    prover = await ready(model, engine)
    await prover.check(engine, manifest())
    engine.off = 2e-3
    await prover.check(engine, manifest())
    engine.off = 4e-3
    with pytest.raises(LoadRejected):
        await prover.check(engine, manifest())


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.02), ("bfloat16", 2.0), ("bfloat16", float("nan"))])
async def test_not_even_the_first_load_may_be_off_by_anything(model: Path, dtype: str, off: float) -> None:
    engine = Answers(off=off)
    prover = await ready(model, engine, dtype)
    with pytest.raises(LoadRejected):
        await prover.check(engine, manifest())


async def test_a_version_without_a_canary_is_not_asked_about(model: Path) -> None:
    engine = Answers(off=1.0)
    await (await ready(model, engine)).check(engine, manifest(None))


def metas(weights: dict[str, torch.Tensor], dtype: DType) -> list[TensorMeta]:
    return [TensorMeta(name=name, dtype=dtype, shape=tuple(weight.shape)) for name, weight in weights.items()]


def test_a_model_built_without_its_weights_answers_as_the_folders_own_once_they_are_loaded(model: Path) -> None:
    facts = read_model(str(model), trust_remote_code=False)
    built = build_model(facts, dtype="float32", trust_remote_code=False)
    load_weights(built, model / "model.safetensors")
    own = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = list(range(3, 20))
    assert token_logprobs(built, ids) == pytest.approx(token_logprobs(own, ids), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("left_behind", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_tensor_that_a_reload_leaves_behind_shows_in_the_probe(
    tmp_path: Path, dtype: DType, left_behind: str
) -> None:
    folder = make_model(tmp_path / "model", tied=False, dtype=getattr(torch, dtype))
    mirror = folder / "model.safetensors"
    weights = load_file(mirror)
    facts = read_model(str(folder), trust_remote_code=False)
    probe = make_probe(
        mirror, metas(weights, dtype), folder=tmp_path, model=facts, dtype=dtype, trust_remote_code=False
    )
    engine = build_model(facts, dtype=dtype, trust_remote_code=False)

    load_weights(engine, probe.path)
    probe.check(token_logprobs(engine, list(probe.token_ids)))

    partly = {**load_file(probe.path), left_behind: weights[left_behind]}
    save_file(partly, tmp_path / "partly.safetensors")
    load_weights(engine, tmp_path / "partly.safetensors")
    with pytest.raises(LoadRejected, match="does not serve what it was told to load"):
        probe.check(token_logprobs(engine, list(probe.token_ids)))


def test_in_fp32_the_probe_shows_any_matrix_left_behind(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture="llama", tied=False)
    mirror = folder / "model.safetensors"
    weights = load_file(mirror)
    facts = read_model(str(folder), trust_remote_code=False)
    probe = make_probe(
        mirror, metas(weights, "float32"), folder=tmp_path, model=facts, dtype="float32", trust_remote_code=False
    )
    engine = build_model(facts, dtype="float32", trust_remote_code=False)
    changed = load_file(probe.path)
    for name in (name for name, weight in weights.items() if weight.ndim == 2):
        save_file({**changed, name: weights[name]}, tmp_path / "partly.safetensors")
        load_weights(engine, tmp_path / "partly.safetensors")
        with pytest.raises(LoadRejected):
            probe.check(token_logprobs(engine, list(probe.token_ids)))
