"""What is published, by the names of the hub's files: the tensors that `save_pretrained` writes, without copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from streamrl.workers.engines.hf_model import published
from streamrl.workers.engines.vllm.loading.hub_names import HubNames
from tests.tiny_families import make_family

FAMILIES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "glm4_moe", "llama4_text", "gpt_neox", "llama"),
    *("afmoe", "ernie4_5_moe", "hy_v3", "laguna", "lfm2_moe", "minimax_m2"),  # biases by other names in the files
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' older families
    pytest.mark.usefixtures("quiet_transformers"),
]


def held(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in published(model).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_and_values_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    found = dict(HubNames(str(folder), trust_remote_code=False).of(held(folder).items()))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_nothing_is_copied_and_each_stack_goes_as_it_comes(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "qwen3_moe")
    tensors = held(folder)
    begins = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    given: list[str] = []

    def noting() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            given.append(name)
            yield name, tensor

    for name, tensor in HubNames(str(folder), trust_remote_code=False).of(noting()):
        assert tensor.untyped_storage().data_ptr() in begins
        if ".experts." in name:
            assert name.rpartition(".experts.")[0] in given[-1]
    assert len(given) == len(tensors)
