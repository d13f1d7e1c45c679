"""A version that is pulled from a live run is the folder that the learner exports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.checkpoints.export import export
from streamrl.ops.cli.models.weights import OtherNames
from streamrl.protocol.weights.published import pull
from tests.publish_world import ALONE, Scene, publish
from tests.tiny_families import make_family
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("quiet_transformers")
LORA = schema.Lora(rank=4, alpha=6.0, targets=("q_proj", "o_proj"))


def tensors_of(folder: Path) -> dict[str, dict[str, Any]]:
    """By name: dtype, shape and bytes."""
    return {name: entry for file in folder.glob("*.safetensors") for name, entry in deserialize(file.read_bytes())}


def pulled(scene: Scene, folder: Path, *, model: Path | None = None) -> Path:
    publish(scene.publisher, 0)
    [manifest] = scene.stream.manifests
    base = Path(scene.config.model.path) if model is None else model
    versions = {manifest.version: manifest}
    pull(manifest.version, versions, scene.store, model=base, folder=folder, other_names=OtherNames())
    return folder


def trained(folder: Path, family: str, lora: schema.Lora | None = None) -> Scene:
    scene = Scene(folder, family=family, lora=lora)
    with torch.no_grad():
        for parameter in scene.policy.parameters():
            if parameter.requires_grad:
                parameter += 0.25
    return scene


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_pulled_version_has_the_tensors_and_settings_of_an_export(
    tmp_path: Path, family: str, lora: schema.Lora | None
) -> None:
    scene = trained(tmp_path, family, lora)
    found = pulled(scene, tmp_path / "pulled")
    exported = export(scene.policy, make_tokenizer(), scene.config.model_copy(update={"dir": tmp_path}), ALONE)
    assert tensors_of(found) == tensors_of(exported)
    if family == "mixtral":
        assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in tensors_of(found)
    config, expected = (json.loads((folder / "config.json").read_text()) for folder in (found, exported))
    assert {name: config[name] for name in ("dtype", "architectures")} == {
        name: expected[name] for name in ("dtype", "architectures")
    }
    assert not [path for path in found.iterdir() if path.name.startswith("mirror")]


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_pulled_version_is_not_quantized_and_may_be_read_by_others(tmp_path: Path, family: str) -> None:
    scene = trained(tmp_path, family)
    path = Path(scene.config.model.path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    before = os.umask(0o027)
    try:
        found = pulled(scene, tmp_path / "pulled")
    finally:
        os.umask(before)
    assert "quantization_config" not in json.loads((found / "config.json").read_text())
    [weights] = found.glob("*.safetensors")
    assert weights.stat().st_mode & 0o777 == 0o640


def test_another_model_than_the_runs_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    scene = trained(tmp_path / "run", "mixtral")
    other = make_family(tmp_path / "other", "mixtral", num_hidden_layers=1)
    with pytest.raises(DataError, match=r"other is not the model of this run: it differs in model\.layers\.1\."):
        pulled(scene, tmp_path / "pulled", model=other)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other"}
