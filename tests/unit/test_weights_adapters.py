"""Adapters published alone, and merged by whoever serves them: to the bit what the learner says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.errors import DataError, TransportError, WeightsError
from streamrl.learner.loading.build import load_model
from streamrl.learner.model.lora import merged, merged_parameters
from streamrl.ops.cli.models.weights import OtherNames
from streamrl.protocol.weights.adapters import Adapter, merge
from streamrl.protocol.weights.format import BITS, Bits, Coding, DType, TensorMeta
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import PretrainedFiles
from streamrl.protocol.weights.published import full_bytes, pull
from tests.publish_world import Scene, finish, publish

DTYPES: list[DType] = ["bfloat16", "float32"]


def bits(tensor: torch.Tensor) -> Bits:
    integers = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.contiguous().view(integers).numpy().reshape(-1).view(f"<u{tensor.element_size()}")


def draw(dtype: DType, *, rank: int, transposed: bool) -> tuple[Adapter, dict[str, torch.Tensor]]:
    torch.manual_seed(rank)
    shape = (300, 520)
    tensors = {"w": torch.randn(*shape) / 10, "a": torch.randn(rank, shape[1]), "b": torch.randn(shape[0], rank) / 50}
    if transposed:
        tensors["w"] = tensors["w"].T.contiguous()
    adapter = Adapter(tensor="w", a="a", b="b", is_transposed=transposed, scale=4 / 3)
    return adapter, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def merged_by_a_worker(adapter: Adapter, tensors: dict[str, torch.Tensor], dtype: DType) -> Bits:
    metas = {name: TensorMeta(name=name, dtype=dtype, shape=tuple(of.shape)) for name, of in tensors.items()}
    out = np.zeros(metas["w"].num_elements, BITS[dtype])
    merge(adapter, metas, pretrained=bits(tensors["w"]), a=bits(tensors["a"]), b=bits(tensors["b"]), out=out)
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_learner_and_worker_merge_to_the_same_bits(dtype: DType, rank: int, transposed: bool) -> None:
    adapter, tensors = draw(dtype, rank=rank, transposed=transposed)
    by_learner = merged(tensors["w"], adapter, tensors, getattr(torch, dtype))
    assert np.array_equal(merged_by_a_worker(adapter, tensors, dtype), bits(by_learner))
    product = tensors["b"].double() @ tensors["a"].double()
    truth = tensors["w"].double() + 4 / 3 * (product.T if transposed else product)
    torch.testing.assert_close(by_learner.double(), truth, rtol=torch.finfo(by_learner.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_sums_does_not_matter(dtype: DType) -> None:
    adapter, tensors = draw(dtype, rank=32, transposed=False)
    first = merged_by_a_worker(adapter, tensors, dtype)
    order = torch.randperm(32)
    turned = {"w": tensors["w"], "a": tensors["a"][order], "b": tensors["b"][:, order]}
    assert np.array_equal(merged_by_a_worker(adapter, turned, dtype), first)


@pytest.fixture(params=DTYPES)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A learner of adapters that do something."""
    lora = schema.Lora(rank=4, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
    scene = Scene(tmp_path, lora=lora, dtype=request.param)
    nudge(scene)
    return scene


def nudge(scene: Scene) -> None:
    with torch.no_grad():
        for name, parameter in scene.policy.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def pretrained(scene: Scene) -> PretrainedFiles:
    return PretrainedFiles([Path(scene.config.model.path) / "model.safetensors"], name="tiny")


def assert_serves(mirror: Mirror, scene: Scene) -> None:
    dtype = getattr(torch, scene.config.weights.dtype)
    truth = {name: tensor.detach().to(dtype) for name, tensor in merged_parameters(scene.policy.model, dtype)}
    served = safetensors.torch.load_file(mirror.path)
    assert served.keys() == truth.keys()
    assert all(torch.equal(served[name], truth[name]) for name in truth)


def test_a_version_is_its_adapters_and_is_served_merged(scene: Scene, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(scene))
    for step in range(4):
        publish(scene.publisher, step)
        mirror.apply(scene.stream.manifests[-1], scene.store)
        assert_serves(mirror, scene)
        nudge(scene)
    stored = max(manifest.num_bytes for manifest in scene.stream.manifests)
    assert 0 < stored < 0.3 * sum(tensor.num_bytes for tensor in scene.stream.manifests[-1].served)


def test_deltas_of_adapters_change_what_is_served(scene: Scene, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(scene))
    publish(scene.publisher, 0)
    with torch.no_grad():
        next(p for name, p in scene.policy.named_parameters() if "lora_B" in name)[0, 0] += 1.0
    publish(scene.publisher, 1)
    first, second = scene.stream.manifests
    assert (second.base, second.num_bytes) == (first.version, pytest.approx(20, abs=20))
    mirror.apply(first, scene.store)
    mirror.apply(second, scene.store)
    assert_serves(mirror, scene)


def test_who_comes_late_takes_an_anchor_of_adapters(scene: Scene, tmp_path: Path) -> None:
    publish(scene.publisher, 0)
    nudge(scene)
    scene.publisher.begin(1, whole=True)
    finish(scene.publisher)
    late = Mirror(tmp_path / "late", pretrained=pretrained(scene))
    anchor = scene.stream.manifests[-1].as_anchor()
    assert anchor is not None
    late.apply(anchor, scene.store)
    assert_serves(late, scene)


def test_the_next_learner_may_scale_adapters_otherwise(scene: Scene, tmp_path: Path) -> None:
    """Its first version is an anchor of the same tensors, and of the same adapters as they happen to be."""
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(scene))
    publish(scene.publisher, 0)
    mirror.apply(scene.stream.manifests[-1], scene.store)
    assert scene.config.model.lora is not None
    lora = scene.config.model.lora.model_copy(update={"alpha": 12.0})
    successor = Scene(tmp_path, lora=lora, dtype=scene.config.weights.dtype, term=4, store=scene.store)
    successor.policy.load_state_dict(scene.policy.state_dict())
    publish(successor.publisher, 0)
    mirror.apply(successor.stream.manifests[-1], scene.store)
    assert_serves(mirror, successor)


def test_a_version_is_pulled_merged(scene: Scene, tmp_path: Path) -> None:
    publish(scene.publisher, 0)
    [manifest] = scene.stream.manifests
    folder = tmp_path / "pulled"
    pull(
        manifest.version,
        {manifest.version: manifest},
        scene.store,
        model=Path(scene.config.model.path),
        folder=folder,
        other_names=OtherNames(),
    )
    pulled = dict(load_model(str(folder)).named_parameters())
    dtype = getattr(torch, scene.config.weights.dtype)
    for name, tensor in merged_parameters(scene.policy.model, dtype):
        assert torch.equal(pulled[name], tensor.to(dtype).float())
    assert full_bytes(manifest) == sum(tensor.num_bytes for tensor in manifest.served)


def test_another_pretrained_model_is_refused_by_its_first_other_element(scene: Scene, tmp_path: Path) -> None:
    publish(scene.publisher, 0)
    file = Path(scene.config.model.path) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] += 1
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(scene))
    with pytest.raises(DataError, match=f"not the one that the learner trains: {name} differs from element 0"):
        mirror.apply(scene.stream.manifests[-1], scene.store)
    assert mirror.version == 0


def test_a_worker_that_merges_otherwise_serves_nothing(scene: Scene, tmp_path: Path) -> None:
    publish(scene.publisher, 0)
    manifest = scene.stream.manifests[-1]
    other = replace(manifest, adapters=tuple(replace(one, scale=one.scale * 1.01) for one in manifest.adapters))
    mirror = Mirror(tmp_path / "mirror", pretrained=pretrained(scene))
    with pytest.raises(WeightsError, match="merged, does not match the learner's digest"):
        mirror.apply(other, scene.store)
    assert mirror.version == 0


def test_all_merged_tensors_are_told_first_and_each_again_in_turn(scene: Scene) -> None:
    publish(scene.publisher, 0)
    adapted = {adapter.tensor for adapter in scene.stream.manifests[-1].adapters}
    assert told(scene) == adapted
    later: set[str] = set()
    for step in range(1, 17):
        publish(scene.publisher, step)
        later |= told(scene)
        assert len(told(scene)) < len(adapted)
    assert later == adapted


def test_a_first_version_that_could_not_be_published_leaves_all_merged_tensors_to_the_next(scene: Scene) -> None:
    scene.stream.refusal = TransportError("Redis is away")
    scene.publisher.begin(0)
    assert scene.publisher.settle(wait_s=60.0) is None
    assert scene.publisher.failing
    scene.stream.refusal = None
    publish(scene.publisher, 0)
    assert told(scene) == {adapter.tensor for adapter in scene.stream.manifests[-1].adapters}


def told(scene: Scene) -> set[str]:
    [shard] = scene.stream.manifests[-1].shards
    return {part.tensor for part in shard.ranges if part.coding is Coding.MERGED}


def test_adapters_that_do_not_fit_are_no_manifest(scene: Scene) -> None:
    publish(scene.publisher, 0)
    manifest = scene.stream.manifests[-1]
    assert decode_manifest(encode_manifest(manifest)) == manifest
    one, two, three, *rest = manifest.adapters
    others = [replace(three, a=two.a), replace(three, is_transposed=True), replace(three, b=three.a, a=three.b)]
    for adapters in [(one, two, other, *rest) for other in others] + [(one, one, *rest)]:
        with pytest.raises(WeightsError, match=r"does not fit|two adapters"):
            encode_manifest(replace(manifest, adapters=adapters))


def test_without_a_pretrained_model_adapters_are_of_no_use(scene: Scene, tmp_path: Path) -> None:
    publish(scene.publisher, 0)
    with pytest.raises(DataError, match="adapters only: give the base model"):
        Mirror(tmp_path / "mirror").apply(scene.stream.manifests[-1], scene.store)
