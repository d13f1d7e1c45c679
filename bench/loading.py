"""A rank's peak memory while loading a mixture of experts, against its shard and the largest layer.

    counted    models of published sizes, in files with headers and no data; the learner's own code reads them into
               tensors without memory, with ranks that do not exist
    real       a model of 200 MB on disk, as one of eight ranks reads it: growth of the process

The bar of both: 1.2 x the shard + the largest layer, in fp32, like the masters. With `quick`, models of four layers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.core_model_loading import revert_weight_conversion

from bench.loading_cases import CASES, REAL, Case
from bench.measure import Say
from bench.memory_run import Held
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.learner.loading.build import begin_model
from streamrl.learner.loading.converted import stored_in
from streamrl.learner.loading.load import fill, make_policy
from streamrl.learner.loading.sources import Files, Region
from streamrl.learner.parallel.dtensors import held_rows
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.process.ranks import World

_TIMES, _GOAL = 1.2, 1.0
_WIDTHS = {"BF16": 2, "U8": 1}
_FILE_BYTES = 4 * 10**9


def bench(*, quick: bool, say: Say) -> list[Line]:
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            say(name)
            lines += _counted(name, case.short if quick else case, Path(folder) / str(number))
        say("a model of 200 MB, as one of eight ranks")
        lines += _real(Path(folder) / "real", quick=quick)
    return lines


def _counted(name: str, case: Case, folder: Path) -> Iterator[Line]:
    write_empty(folder, case)
    dist.init_process_group("fake", rank=1, world_size=case.ranks, store=FakeStore())
    try:
        sizes, shard_bytes, peak = count(folder, World(rank=1, size=case.ranks, device=torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    yield from _lines(name, sizes, shard_bytes, peak)


def _lines(name: str, sizes: Sizes, shard_bytes: int, peak: int) -> Iterator[Line]:
    allowed = _TIMES * shard_bytes + 4 * sizes.layer
    yield Bar(name=f"{name}: of the bar", value=peak / allowed, unit="x", goal=_GOAL, better="lower")
    yield Fact(name=f"{name}: peak", value=peak / 1e9, unit="GB")
    yield Fact(name=f"{name}: shard", value=shard_bytes / 1e9, unit="GB")
    yield Fact(name=f"{name}: largest layer", value=4 * sizes.layer / 1e9, unit="GB")
    yield Fact(name=f"{name}: whole", value=4 * (sizes.trained + sizes.frozen) / 1e9, unit="GB")


class _WithoutBytes(Files):
    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

    def read(self, path: Path, name: str, region: Region) -> torch.Tensor:
        return torch.empty([last - first for first, last in region], dtype=self._dtypes[name])


def count(folder: Path, world: World) -> tuple[Sizes, int, int]:
    """Return (sizes, shard bytes, peak bytes) of a rank that loads the model in this folder."""
    model, sources = begin_model(str(folder), attention="eager", world=world)
    assert sources, "it is read by rows"
    sizes, policy = Sizes.of(model), shard(make_policy(model, config_for(folder), (1,), world), world)
    kinds = {name: stored.dtype for name, stored in stored_in(str(folder)).items()}
    dtypes = {name: torch.bfloat16 if kind == "BF16" else torch.uint8 for name, kind in kinds.items()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Held(mode, ()) as held, held.phase("loading"):
        fill(policy, sources, world.device, files=_WithoutBytes(dtypes))
    shard_bytes = sum(held_rows(parameter)[1].nbytes for parameter in policy.parameters())
    return sizes, shard_bytes, held.peaks["loading"]


def config_for(folder: Path) -> schema.Config:
    return schema.Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "t"},
            "rewards": {"r": {"type": "function", "target": "exact_match"}},
        }
    )


def write_empty(folder: Path, case: Case) -> None:
    """Write the configuration, and sparse files with full headers."""
    config = case.config
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {
        name: ("BF16", tuple(t.shape)) for name, t in revert_weight_conversion(model, model.state_dict()).items()
    }
    if case.packed:
        tensors = dict(one for name, (_, shape) in tensors.items() for one in _packed(name, shape))
        config.quantization_config = {"quant_method": "mxfp4"}
        config.save_pretrained(folder)
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    num_bytes = 0
    for name, one in tensors.items():
        if num_bytes > _FILE_BYTES:
            files.append({})
            num_bytes = 0
        files[-1][name] = one
        num_bytes += _bytes_of(one)
    names = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
    for file_name, held in zip(names, files, strict=True):
        _write_hole(folder / file_name, held)
    index = {name: file_name for file_name, held in zip(names, files, strict=True) for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_hole(path: Path, held: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    layout, end = {}, 0
    for name, one in held.items():
        begin, end = end, end + _bytes_of(one)
        layout[name] = {"dtype": one[0], "shape": one[1], "data_offsets": [begin, end]}
    header = json.dumps(layout).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _bytes_of(one: tuple[str, tuple[int, ...]]) -> int:
    return _WIDTHS[one[0]] * torch.Size(one[1]).numel()


def _packed(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return gpt-oss's experts in their published format: two numbers per byte, and an exponent for each 32."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        yield name, ("BF16", shape)
        return
    experts, inputs, outputs = shape
    yield f"{name}_blocks", ("U8", (experts, outputs, inputs // 32, 16))
    yield f"{name}_scales", ("U8", (experts, outputs, inputs // 32))


def _real(folder: Path, *, quick: bool) -> Iterator[Line]:
    """Measure in a separate process, whose memory nothing else has grown."""
    case = REAL.short if quick else REAL
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(case.config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    sizes = Sizes.of(model)
    del model
    words = [sys.executable, "-m", "bench.loading_rank", str(folder), str(case.ranks)]
    measured = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=300).stdout)
    yield from _lines("200 MB, as 1 of 8 ranks, real bytes", sizes, measured["shard"], measured["grew"])
