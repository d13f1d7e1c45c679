"""An export written tensor by tensor has the names of the hub and the bytes of `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamrl.config import schema
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.hub_files import HubFiles
from streamrl.learner.loading.build import build_model, load_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.parallel.dtensors import persistent_buffers
from tests.helpers import files_up_to
from tests.learner_cases import learner_config
from tests.tiny_families import make_family
from tests.tiny_models import make_tokenizer
from tests.unit.test_sources import ALONE, packed

EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "jamba", "llama4_text", "gpt_neox", "llama")
LONG = {"jamba"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' older families
    pytest.mark.usefixtures("quiet_transformers"),
]


def write(model: torch.nn.Module, like: Path, folder: Path, dtype: torch.dtype) -> None:
    with HubFiles(folder, build_model(str(like), "sdpa"), dtype) as files:
        for name, parameter in model.named_parameters():
            files.take(name, parameter.detach().to(dtype))
        for name, buffer in persistent_buffers(model):
            files.take(name, buffer)


def assert_same_files(found: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in found.iterdir()} >= names >= {"config.json"}
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in EXPERTS]
)
def test_the_bytes_are_those_that_transformers_saves(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    model = load_model(str(folder)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "expected")
    write(model, folder, tmp_path / "found", torch.bfloat16)
    assert_same_files(tmp_path / "found", tmp_path / "expected")


def test_a_large_model_is_in_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family(tmp_path / "model", "qwen3_moe")
    monkeypatch.setattr("streamrl.learner.checkpoints.hub_files._MAX_FILE_BYTES", 60_000)
    model = load_model(str(folder))
    write(model, folder, tmp_path / "found", torch.float32)
    files = list((tmp_path / "found").glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 80_000 for file in files)
    read = dict(load_model(str(tmp_path / "found")).named_parameters())
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "minimax"])
def test_buffers_that_nothing_computes_are_exported_as_they_are(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    model = load_model(str(folder))
    kept = dict(persistent_buffers(model))
    assert kept
    with torch.no_grad():
        for buffer in kept.values():
            buffer.normal_()
    write(model, folder, tmp_path / "found", torch.bfloat16)
    read = load_model(str(tmp_path / "found"))
    assert all(torch.equal(buffer, dict(read.named_buffers())[name]) for name, buffer in kept.items())
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name].bfloat16().float()), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_trained_mixture_of_experts_is_read_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    if family == "gpt_oss":
        packed(folder)
    config = learner_config(folder, dir=tmp_path, weights=schema.Weights(dtype="bfloat16"))
    policy = load_policy(config, ALONE, (1,))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.25
    exported = export(policy, make_tokenizer(), config, ALONE)
    assert "quantization_config" not in (exported / "config.json").read_text()
    read = dict(load_model(str(exported)).named_parameters())
    trained = dict(policy.model.named_parameters())
    assert read.keys() == trained.keys()
    assert all(torch.equal(read[name], trained[name].bfloat16().float()) for name in read)


def test_generation_defaults_that_transformers_warns_about_are_exported_as_they_are(tmp_path: Path) -> None:
    """As of Vicuna and others: settings of sampling beside greedy decoding, which `save_pretrained` refuses."""
    folder = make_family(tmp_path / "model", "llama")
    defaults = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    write(load_model(str(folder)), folder, tmp_path / "found", torch.float32)
    found = json.loads((tmp_path / "found" / "generation_config.json").read_text())
    assert found.items() >= defaults.items()


def test_a_tensor_that_was_never_given_is_named(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "llama")
    with (
        pytest.raises(AssertionError, match=r"never given: lm_head\.weight"),
        HubFiles(tmp_path / "found", build_model(str(folder), "sdpa"), torch.float32),
    ):
        pass


def test_a_disk_that_fills_up_in_the_midst_of_a_tensor_says_so_and_where(tmp_path: Path) -> None:
    """It takes a part of what it is given, and refuses the rest; a limit on this process's files does likewise."""
    folder = make_family(tmp_path / "model", "llama")
    model = load_model(str(folder))
    size = sum(parameter.nbytes for parameter in model.parameters())
    with files_up_to(size - 10), pytest.raises(OSError, match="File too large") as raised:
        write(model, folder, tmp_path / "found", torch.float32)
    assert raised.value.filename == str(tmp_path / "found")
