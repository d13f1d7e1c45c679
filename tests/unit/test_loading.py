"""Models as users bring them: what is wrong with their files is told before anything is trained on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.checkpoints.export import export
from streamrl.learner.loading.build import build_model, load_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.model.lora import adapter_parameters
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.tiny_families import make_family
from tests.tiny_models import make_model, make_tokenizer

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
GATE = "model.layers.1.mlp.gate_proj.weight"
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> str:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path, metadata={"format": "pt"})
    return str(folder)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {kept: tensor for kept, tensor in held.items() if kept != name}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {prefix + name: tensor for name, tensor in held.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(GATE), rf"its files hold no {GATE}, and lack 1 parameters in all"),
        (without("lm_head.weight"), r"hold no lm_head\.weight; .* set tie_word_embeddings: true in its config\.json"),
        *((prefixed(f"{word}."), "hold no lm_head.weight, and lack 21 ") for word in ("_orig_mod", "module")),
        (prefixed("base_model.model."), "hold no lm_head.weight, and lack 21 "),
        (
            lambda held: {name.replace("norm.weight", "norm.gamma"): tensor for name, tensor in held.items()},
            "hold no model.layers.0.input_layernorm.weight, and lack 5 ",
        ),
    ],
)
def test_files_that_lack_parameters_are_refused_with_one_of_them(
    tmp_path: Path, change: Callable[[Tensors], Tensors], told: str
) -> None:
    """transformers draws them at random, and says so only in its log."""
    folder = rewritten(make_model(tmp_path, architecture="llama", tied=False), change)
    with pytest.raises(DataError, match=told):
        load_policy(learner_config(Path(folder)), ALONE, (1,))


def test_a_head_that_is_not_the_embedding_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = make_model(tmp_path, tied=True)
    head = {"lm_head.weight": load_model(str(folder)).lm_head.weight.detach().clone()}
    rewritten(folder, lambda held: {**held, **head})
    load_policy(learner_config(folder), ALONE, (1,))  # the embedding once more

    rewritten(folder, lambda held: {**held, "lm_head.weight": head["lm_head.weight"] + 1})
    with pytest.raises(DataError, match=r"hold lm_head\.weight, which .* set tie_word_embeddings: false there"):
        load_policy(learner_config(folder), ALONE, (1,))


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        *(({"quant_method": name}, name) for name in ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes")),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_quantised_weights_are_refused_whatever_is_installed(
    tmp_path: Path, settings: dict[str, Any], method: str
) -> None:
    folder = make_model(tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = settings
    config.save_pretrained(folder)
    for load in (load_model, lambda path: build_model(path, "sdpa")):
        with pytest.raises(DataError, match=rf"is quantised \({method}\), which is not undone here: use .* bfloat16"):
            load(str(folder))


def test_end_tokens_that_no_logit_is_of_are_not_called_a_model_that_looks_ahead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its log-probs cannot be computed \(IndexError"):
        load_policy(learner_config(make_model(tmp_path)), ALONE, (99_999,))


def make_reader_of_images(folder: Path) -> Path:
    """Gemma 3 from 4B: a language model beside a vision tower, whose layers have the same names."""
    tokenizer = make_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attention_dropout": 0.5,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 4,
    }
    whole: dict[str, Any] = {"mm_tokens_per_image": 4, "image_token_id": 2, "eos_token_id": 1}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **whole)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    return folder


def test_noise_of_a_language_model_beside_another_is_turned_off(tmp_path: Path) -> None:
    folder = str(make_reader_of_images(tmp_path))
    for model in (load_model(folder), build_model(folder, "sdpa")):
        assert model.config.get_text_config().attention_dropout == 0.0


def test_of_a_model_that_reads_images_only_the_language_model_gets_adapters_and_the_export_has_all_files(
    tmp_path: Path,
) -> None:
    folder = make_reader_of_images(tmp_path / "model")
    model = schema.Model(path=str(folder), dtype="float32", lora=schema.Lora(rank=4))
    config = learner_config(folder, dir=tmp_path, model=model)
    policy = load_policy(config, ALONE, (1,))
    names = [name for name, _ in adapter_parameters(policy.model)]
    assert len(names) == 12
    assert all(".language_model." in name for name in names)

    exported = export(policy, make_tokenizer(), config, ALONE)

    for name in ("processor_config.json", "preprocessor_config.json"):
        assert (exported / name).read_text() == (folder / name).read_text()
    read = dict(load_model(str(exported)).named_parameters())
    assert all(torch.equal(tensor, read[name]) for name, tensor in load_model(str(folder)).named_parameters())
    peft = pytest.importorskip("peft")
    adapted = peft.PeftModel.from_pretrained(load_model(str(folder)), exported / "adapter")
    assert {name for name, _ in adapted.named_parameters() if "lora_" in name} == {
        name.replace(".weight", ".default.weight") for name in names
    }


@pytest.mark.parametrize("family", ["gpt_oss", "zamba2", "ernie4_5_moe"])
def test_families_with_rules_of_their_own_lack_nothing(tmp_path: Path, family: str) -> None:
    """Experts, layers that share weights, and biases of routers; transformers names what it did not find."""
    assert load_model(str(make_family(tmp_path, family)))
