"""A model read row by row from its files is, bit for bit, the one that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from streamrl.config import schema
from streamrl.learner.checkpoints.export import export
from streamrl.learner.loading.build import begin_model, load_model
from streamrl.learner.loading.load import fill, load_policy, load_reference, make_policy
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.tiny_models import make_model, make_tokenizer

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in found.items()}


def read(folder: Path) -> transformers.PreTrainedModel:
    """Row by row; it must not have been loaded whole."""
    model, weights = begin_model(str(folder), attention="sdpa", world=ALONE)
    assert weights
    assert all(parameter.is_meta for parameter in model.parameters())
    policy = load_policy(learner_config(folder), ALONE, (1,))
    return policy.model


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path, metadata={"format": "pt"})
    return folder


def in_many_files(folder: Path) -> Path:
    model = load_model(str(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_computed_buffers_are_those_that_transformers_loads(
    tmp_path: Path, tied: bool, architecture: str, dtype: torch.dtype
) -> None:
    folder = make_model(tmp_path, architecture=architecture, tied=tied, dtype=dtype)
    whole, ours = load_model(str(folder)), read(folder)
    expected, found = tensors(whole), tensors(ours)
    assert found.keys() == expected.keys()
    assert "model.rotary_emb.inv_freq" in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied


def test_weights_in_many_files_are_found_by_their_index(tmp_path: Path) -> None:
    folder = make_model(tmp_path, tied=False)
    expected = tensors(load_model(str(folder)))
    found = tensors(read(in_many_files(folder)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tied_embedding_may_lie_under_the_name_of_the_head(tmp_path: Path) -> None:
    folder = make_model(tmp_path, tied=True)
    expected = tensors(load_model(str(folder)))
    rewrite(folder, lambda held: {"lm_head.weight": held.pop("model.embed_tokens.weight"), **held})
    found = tensors(read(folder))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: {**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()},
        lambda held: {**held, "model.norm.weight": held["model.norm.weight"].to(torch.float8_e4m3fn)},
    ],
    ids=["tied tensors twice", "no plain numbers"],
)
def test_what_transformers_would_convert_is_left_to_transformers(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    folder = rewrite(make_model(tmp_path, tied=True), change)
    model, weights = begin_model(str(folder), attention="sdpa", world=ALONE)
    assert not weights
    expected, found = tensors(load_model(str(folder))), tensors(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_loaded_whole_gets_to_the_device_only_once_it_is_known_whether_it_is_sharded(
    tmp_path: Path, tied: bool
) -> None:
    """FSDP moves a layer at a time. This device holds nothing: no GPU has run this."""
    folder = make_model(tmp_path, tied=tied)
    torch.save(load_model(str(folder)).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    elsewhere = World(rank=0, size=1, device=torch.device("meta"))
    model, weights = begin_model(str(folder), attention="sdpa", world=elsewhere)
    assert not weights
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    fill(make_policy(model, learner_config(folder), (1,), elsewhere), weights, elsewhere.device)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_adapters_begin_alike_whichever_way_their_base_is_loaded(tmp_path: Path) -> None:
    plain, odd = make_model(tmp_path / "plain"), make_model(tmp_path / "odd")
    rewrite(odd, lambda held: {**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()})
    found = []
    for folder in (plain, odd):
        torch.manual_seed(5)
        model = schema.Model(path=str(folder), dtype="float32", lora=schema.Lora(rank=4))
        found.append(tensors(load_policy(learner_config(folder, model=model), ALONE, (1,)).model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])
    first = found[0]["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert first.std() > 0
    assert not found[0]["model.layers.0.self_attn.q_proj.lora_B.default.weight"].any()


def test_a_bfloat16_reference_rotates_like_the_policy(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    config = learner_config(folder, model=schema.Model(path=str(folder), dtype="bfloat16"))
    reference, policy = load_reference(config, ALONE, (1,)), load_policy(config, ALONE, (1,))
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    for (name, ours), (_, theirs) in zip(reference.named_buffers(), policy.named_buffers(), strict=True):
        assert ours.dtype == torch.float32, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("tied", "twice"), [(True, False), (False, False), (True, True)], ids=["tied", "untied", "tied, and loaded whole"]
)
def test_an_export_is_to_the_byte_what_transformers_saves_of_the_trained_model(
    tmp_path: Path, tied: bool, twice: bool
) -> None:
    folder = make_model(tmp_path / "model", tied=tied, dtype=torch.bfloat16)
    transformers.GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[1, 2]).save_pretrained(folder)
    if twice:
        rewrite(folder, lambda held: {**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()})
    config = learner_config(folder, dir=tmp_path, weights=schema.Weights(dtype="bfloat16"))
    policy = load_policy(config, ALONE, (1,))
    model = load_model(str(folder))
    with torch.no_grad():
        for parameter in (*policy.parameters(), *model.parameters()):
            parameter += 0.25
    model.to(torch.bfloat16).save_pretrained(tmp_path / "expected")
    exported = export(policy, make_tokenizer(), config, ALONE)
    names = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    for name in names:
        assert (exported / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
