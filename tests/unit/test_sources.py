"""A parameter read region by region from files that hold its parts: bit for bit what transformers makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Transpose, WeightConverter

from streamrl.errors import ResourceError
from streamrl.learner.loading.build import begin_model, build_model, load_model, refuse_whole
from streamrl.learner.loading.converted import Unlike, sources_of
from streamrl.learner.loading.sources import Files, Region, Source
from streamrl.learner.process.ranks import World
from tests.tiny_families import make_family

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
# Those whose files have experts one by one, or under other names, or beside buffers; the last ones for what is plain.
EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "granitemoe", "granitemoehybrid", "gpt_oss", "olmoe"),
    *("glm4_moe", "deepseek_v2", "deepseek_v3", "llama4_text", "jamba", "minimax"),
    *("llama", "gemma2"),
)
LONG = {"qwen3_next", "granitemoehybrid", "jamba", "minimax", "deepseek_v2", "qwen2_moe"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' older families
    pytest.mark.usefixtures("quiet_transformers"),
]


def made(folder: Path) -> Mapping[str, Source]:
    parameters, buffers = sources_of(build_model(str(folder), "sdpa"), str(folder))
    return {**parameters, **buffers}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    model = load_model(str(folder))
    return {name: t.detach().float() for name, t in (*model.named_parameters(), *model.named_buffers())}


def rows(source: Source, first: int, last: int, files: Files | None = None) -> torch.Tensor:
    target = torch.empty((last - first, *source.shape[1:]))
    source.fill(target, ((first, last), *((0, size) for size in source.shape[1:])), files or Files())
    return target


def assert_equal_at_any_number_of_ranks(folder: Path) -> None:
    expected, sources = whole(folder), made(folder)
    assert sources.keys() >= {name for name, _ in load_model(str(folder)).named_parameters()}
    for name, source in sources.items():
        for ranks in (1, 2, 4):
            size = -(-source.shape[0] // ranks)
            borders = [min(rank * size, source.shape[0]) for rank in range(ranks + 1)]
            parts = [rows(source, *pair) for pair in pairwise(borders)]
            assert torch.equal(torch.cat(parts), expected[name]), (name, ranks)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in EXPERTS]
)
def test_each_ranks_rows_are_those_of_the_model_that_transformers_loads(tmp_path: Path, family: str) -> None:
    assert_equal_at_any_number_of_ranks(make_family(tmp_path, family))


def test_four_bit_experts_are_unpacked_as_transformers_unpacks_them(tmp_path: Path) -> None:
    assert_equal_at_any_number_of_ranks(packed(make_family(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96)))


def packed(folder: Path) -> Path:
    """gpt-oss as its publisher has it: blocks of random four-bit numbers and their exponents, all else in bfloat16."""
    path = folder / "model.safetensors"
    held = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(path).items()}
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        held[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    safetensors.torch.save_file(held, path, metadata={"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(folder)
    return folder


class Noting(Files):
    """The double that knows what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def read(self, path: Path, name: str, region: Region) -> torch.Tensor:
        found = super().read(path, name, region)
        self.names.append(name)
        self.largest = max(self.largest, found.nbytes)
        return found


def test_a_rank_reads_the_files_of_its_own_experts_alone(tmp_path: Path) -> None:
    sources = made(make_family(tmp_path, "qwen3_moe", num_experts=8))
    files = Noting()
    rows(sources["model.layers.1.mlp.experts.gate_up_proj"], 2, 4, files)
    assert files.names == [
        f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "up") for expert in (2, 3)
    ]
    assert files.largest == 32 * 64 * 4, "one expert's half at a time"


def test_files_are_closed_when_much_of_them_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = made(make_family(tmp_path, "qwen3_moe"))
    monkeypatch.setattr("streamrl.learner.loading.sources._OPEN_BYTES", 1)
    monkeypatch.setattr("streamrl.learner.loading.sources._PIECE_BYTES", 4096)
    expected = whole(tmp_path)
    with Files() as files:
        for name, source in sources.items():
            assert torch.equal(rows(source, 0, source.shape[0], files), expected[name])


def test_experts_that_lack_one_of_their_parts_are_left_to_transformers(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "qwen3_moe")
    path = folder / "model.safetensors"
    held = safetensors.torch.load_file(path)
    del held["model.layers.0.mlp.experts.3.up_proj.weight"]
    safetensors.torch.save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(Unlike, match=r"parts of mlp\.experts\.gate_up_proj have several shapes"):
        made(folder)


def test_an_operation_that_is_not_known_is_left_to_transformers(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "qwen3_moe")
    before = get_checkpoint_conversion_mapping("qwen3_moe")
    turned = WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Transpose(check_dims=True)])
    register_checkpoint_conversion_mapping("qwen3_moe", [*before, turned], overwrite=True)
    try:
        model, unread = begin_model(str(folder), attention="sdpa", world=ALONE)
    finally:
        register_checkpoint_conversion_mapping("qwen3_moe", before, overwrite=True)
    assert not unread
    expected = whole(folder)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_a_model_that_only_fits_whole_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = build_model(str(make_family(tmp_path, "llama")), "sdpa")
    each = 4 * sum(parameter.numel() for parameter in model.parameters())
    refuse_whole(model, "m", Unlike("it is odd"), ranks_here=4, room=4 * each)
    with pytest.raises(
        ResourceError, match=r"because it is odd; the 4 ranks here need .* are free; .*learner\.processes"
    ):
        refuse_whole(model, "m", Unlike("it is odd"), ranks_here=4, room=4 * each - 1)
