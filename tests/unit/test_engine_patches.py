"""A patch file puts what changed where an engine has it, in rows and in tiles, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.protocol.weights.changes import Changed, Elements
from streamrl.workers.engines.vllm.in_place import MAX_KEPT_BYTES, InPlace
from streamrl.workers.engines.vllm.loading.patches import TILE_COLUMNS, TILE_ROWS, Kind, Place, read_patch, write_patch

Matrix = np.ndarray


def in_tiles(weight: Matrix) -> Matrix:
    rows, columns = weight.shape
    blocks = weight.reshape(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS)
    return blocks.transpose(0, 2, 1, 3).reshape(-1)


def place(tensor: str, kind: Kind, *, first_row: int = 0, width: int = 64, parameter: str = "qkv") -> Place:
    return Place(tensor=tensor, parameter=parameter, kind=kind, first_row=first_row, width=width)


def some(rng: np.random.Generator, tensor: Matrix) -> Elements:
    """Of its elements, in no order, one of them twice."""
    positions = rng.permutation(tensor.size)[:200]
    return Elements(
        positions=np.append(positions, positions[0]), bits=tensor.ravel()[np.append(positions, positions[0])]
    )


@pytest.mark.parametrize("kind", ["rows", "tiles"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_elements_of_several_tensors_come_where_a_parameter_has_them(tmp_path: Path, kind: Kind, dtype: str) -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 60_000, (160, 64)).astype(dtype)
    now = before.copy()
    stretches = {"q": (0, 96), "k": (96, 128), "v": (128, 160)}
    changed = {}
    for name, (begin, end) in stretches.items():
        tensor = rng.integers(0, 60_000, (end - begin, 64)).astype(dtype)
        changed[name] = some(rng, tensor)
        now[begin:end].reshape(-1)[changed[name].positions] = changed[name].bits
    places = [place(name, kind, first_row=begin) for name, (begin, _) in stretches.items()]
    path = tmp_path / "patch"

    assert write_patch(Changed(since=7, elements=changed, whole=()), places, path) is None

    flat = in_tiles(before) if kind == "tiles" else before.ravel().copy()
    patch, elements = read_patch(path)
    for parameter, its_kind, index, bits in elements:
        assert (parameter, its_kind) == ("qkv", kind)
        flat[index] = bits
    assert patch.since == 7
    assert np.array_equal(flat, in_tiles(now) if kind == "tiles" else now.ravel())


def test_a_tied_embedding_goes_to_all_of_its_places(tmp_path: Path) -> None:
    tensor = np.arange(64 * 32, dtype=np.uint16).reshape(64, 32)
    elements = some(np.random.default_rng(1), tensor)
    places = [place("embed", "rows", width=32, parameter="embed"), place("embed", "tiles", width=32, parameter="head")]

    write_patch(Changed(since=1, elements={"embed": elements}, whole=()), places, tmp_path / "patch")

    patch, parts = read_patch(tmp_path / "patch")
    assert patch.targets == (("embed", "rows"), ("head", "tiles"))
    for _, kind, index, bits in parts:
        flat = in_tiles(tensor) if kind == "tiles" else tensor.ravel()
        assert np.array_equal(flat[index], bits)


def test_a_layer_that_only_its_kernel_can_read_is_named(tmp_path: Path) -> None:
    tensor = np.zeros((64, 64), dtype=np.uint32)
    changed = Changed(since=1, elements={"gate": some(np.random.default_rng(1), tensor)}, whole=("up",))

    write_patch(changed, [place("gate", "layer"), place("up", "layer", parameter="other")], tmp_path / "patch")

    patch, parts = read_patch(tmp_path / "patch")
    assert (patch.layers, patch.whole, list(parts)) == (("other", "qkv"), ("up",), [])


def test_a_tensor_without_a_place_is_a_reason_to_load_all(tmp_path: Path) -> None:
    changed = Changed(since=1, elements={}, whole=("scales",))

    assert (
        write_patch(changed, [place("q", "rows")], tmp_path / "patch") == "the place of scales in the engine is unknown"
    )
    assert not (tmp_path / "patch").exists()


def test_a_patch_that_is_written_over_a_longer_one_is_read_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for num_rows in (128, 32):
        tensor = rng.integers(0, 60_000, (num_rows, 64)).astype("uint16")
        elements = some(rng, tensor) if num_rows > 32 else Elements(positions=np.arange(7), bits=tensor.ravel()[:7])
        write_patch(
            Changed(since=num_rows, elements={"q": elements}, whole=()), [place("q", "rows")], tmp_path / "patch"
        )

        patch, parts = read_patch(tmp_path / "patch")
        [(_, _, index, bits)] = parts
        assert patch.since == num_rows
        assert np.array_equal(index, elements.positions)
        assert np.array_equal(bits, elements.bits)


@pytest.mark.parametrize("is_large", [False, True])
async def test_the_file_of_a_patch_is_kept_for_the_next_one_unless_it_is_large(tmp_path: Path, is_large: bool) -> None:
    patch = tmp_path / "patch"
    with patch.open("wb") as file:
        file.truncate(MAX_KEPT_BYTES + is_large)
    llm: Any = None  # it is not asked
    await InPlace().loaded(llm, tmp_path / "mirror.safetensors", 1, patch)
    assert patch.exists() == (not is_large)
