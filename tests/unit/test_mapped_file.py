"""The mirror's file, mapped once: what is read is what is in it now, also when it is another file by then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from streamrl.pinning import CudaRuntimeDouble, Pinned
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.mirror_file import create_file
from streamrl.workers.engines.mapped_file import MappedFile
from tests.tiny_models import make_model

TENSORS = (
    TensorMeta(name="embed", dtype="bfloat16", shape=(7, 3)),
    TensorMeta(name="norm", dtype="float32", shape=(5,)),
    TensorMeta(name="scale", dtype="float16", shape=()),
    TensorMeta(name="nothing", dtype="bfloat16", shape=(0, 4)),
)


def assert_reads(file: MappedFile, path: Path) -> None:
    """As the library reads it."""
    read = {name: tensor.clone() for name, tensor in file.tensors(str(path))}
    expected = load_file(path)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor), name


def test_what_was_patched_in_place_is_read_without_mapping_again(tmp_path: Path) -> None:
    path, file = tmp_path / "mirror", MappedFile()
    views = create_file(path, TENSORS)
    assert_reads(file, path)
    held = next(file.tensors(str(path)))[1].untyped_storage().data_ptr()

    for number, view in enumerate(views.values()):
        view[:] = number + 1
    assert_reads(file, path)

    assert next(file.tensors(str(path)))[1].untyped_storage().data_ptr() == held


def test_another_file_under_the_same_name_is_read(tmp_path: Path) -> None:
    path, file = tmp_path / "mirror", MappedFile()
    for size in (4, 4, 9):
        other = tmp_path / f"other-{size}"
        save_file({"one": torch.from_numpy(np.random.default_rng(size).random(size))[:].float()}, other)
        other.rename(path)
        assert_reads(file, path)
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x80\x3f")  # the same file, other bytes
    assert_reads(file, path)


def test_a_whole_model_is_read(tmp_path: Path) -> None:
    assert_reads(MappedFile(), make_model(tmp_path / "model", dtype=torch.bfloat16) / "model.safetensors")


def test_a_file_that_is_closed_takes_no_memory(tmp_path: Path) -> None:
    path, file = tmp_path / "mirror", MappedFile()
    create_file(path, TENSORS)
    assert_reads(file, path)
    assert str(path) in Path("/proc/self/maps").read_text()

    file.close()

    assert str(path) not in Path("/proc/self/maps").read_text()


def test_what_is_pinned_is_the_file_that_is_mapped_and_no_other(tmp_path: Path) -> None:
    runtime = CudaRuntimeDouble()
    path, file = tmp_path / "mirror", MappedFile(Pinned(runtime, runtime.launch))
    for size in (4, 9000):
        save_file({"one": torch.arange(size).float()}, path)
        assert_reads(file, path)
        [(address, num_bytes)] = runtime.pinned.items()
        assert num_bytes == path.stat().st_size
        assert address == next(file.tensors(str(path)))[1].untyped_storage().data_ptr()
    file.close()
    assert not runtime.pinned


def test_a_file_that_may_not_be_pinned_is_read_and_leaves_no_error_to_the_models_next_kernel(tmp_path: Path) -> None:
    """torch would raise it there, as the model's own, and the engine would end at its first load."""
    path, runtime = tmp_path / "mirror", CudaRuntimeDouble(most_bytes=10)
    create_file(path, TENSORS)
    assert_reads(MappedFile(Pinned(runtime, runtime.launch)), path)
    assert not runtime.pinned
    runtime.launch()
