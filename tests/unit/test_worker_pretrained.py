"""The pretrained model as a worker has it: the bits that the learner publishes adapters for, however its files are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.loading.build import load_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.publishing.publish import Publisher
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.workers.weights.pretrained import PretrainedModel
from tests.learner_cases import learner_config
from tests.publish_world import ALONE, BackgroundThreadDouble, FakeStream, publish
from tests.tiny_families import make_family
from tests.tiny_models import make_model


def pretrained(folder: Path) -> PretrainedModel:
    return PretrainedModel(str(folder), trust_remote_code=False)


def as_torch(found: PretrainedModel, tensor: TensorMeta) -> torch.Tensor:
    bits = torch.from_numpy(found.bits(tensor).copy())
    return bits.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)


@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_come_in_the_dtype_that_is_published(tmp_path: Path, kept_in: torch.dtype, dtype: str) -> None:
    folder = make_model(tmp_path / "model", dtype=kept_in)
    for name, parameter in load_model(str(folder)).named_parameters():
        tensor = TensorMeta(name=name, dtype=dtype, shape=tuple(parameter.shape))  # type: ignore[arg-type]
        assert torch.equal(as_torch(pretrained(folder), tensor), parameter.detach().to(getattr(torch, dtype))), name


def test_a_model_in_several_files_is_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model = load_model(str(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    found = pretrained(folder)
    for name, parameter in model.named_parameters():
        tensor = TensorMeta(name=name, dtype="float32", shape=tuple(parameter.shape))
        assert torch.equal(as_torch(found, tensor), parameter)


def test_a_model_that_transformers_converts_is_served_with_its_adapters(tmp_path: Path) -> None:
    """Its files have each expert by itself, and the model all in one tensor."""
    folder = make_family(tmp_path / "model", "qwen3_moe")
    lora = schema.Lora(rank=2, targets=("q_proj",))
    config = learner_config(folder, model=schema.Model(path=str(folder), dtype="float32", lora=lora))
    store, stream = MemoryStore(), FakeStream()
    publisher = Publisher(
        policy=load_policy(config, ALONE, (1,)),
        config=config,
        world=ALONE,
        run_uid="run",
        term=1,
        store=store,
        announcer=stream,
        canary_ids=(3, 4),
        background=BackgroundThreadDouble(),
        sweeping=BackgroundThreadDouble(),
    )
    publish(publisher, 0)
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(folder))
    mirror.apply(stream.manifests[0], store)
    served = safetensors.torch.load_file(mirror.path)
    model = dict(load_model(str(folder)).named_parameters())
    assert served.keys() == model.keys()
    assert all(torch.equal(served[name], model[name]) for name in model)  # B is still zero


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model .*model' cannot be loaded|has no model\.norm\.weight"):
        pretrained(folder).bits(TensorMeta(name="model.norm.weight", dtype="float32", shape=(32,)))


def test_a_model_of_another_size_says_so(tmp_path: Path) -> None:
    found = pretrained(make_model(tmp_path / "model"))
    with pytest.raises(DataError, match=r"has no model\.norm\.weight \[7\], which the learner trains"):
        found.bits(TensorMeta(name="model.norm.weight", dtype="float32", shape=(7,)))


def test_tensors_that_are_asked_for_side_by_side_load_the_model_once(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "qwen3_moe")
    found = pretrained(folder)
    names = [name for name, _ in load_model(str(folder)).named_parameters() if "experts" in name]
    shapes = {name: tuple(p.shape) for name, p in load_model(str(folder)).named_parameters()}
    tensors = [TensorMeta(name=name, dtype="float32", shape=shapes[name]) for name in names]
    with capture_logs() as logs, ThreadPoolExecutor(4) as threads:
        list(threads.map(found.bits, tensors))
    assert [line["event"] for line in logs] == ["pretrained model is loaded whole"]
