"""Which GPUs there are, as nvidia-smi and CUDA_VISIBLE_DEVICES tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import ResourceError
from streamrl.gpus import gpus_here
from tests.gpus_world import machine_with

CUDA = "2.13.0+cu130"


def names(environment: dict[str, str], torch: str = CUDA) -> list[str]:
    return [gpu.name for gpu in gpus_here(environment, torch=torch)]


def test_all_are_there_with_their_memory(tmp_path: Path) -> None:
    first, *others = gpus_here(machine_with(tmp_path, 8), torch=CUDA)

    assert (first.name, len(others)) == ("0", 7)
    assert first.model == "NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert (first.memory, first.free) == (81559 << 20, 81059 << 20)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3,1", ["3", "1"]),  # in the order that was asked for
        ("", []),
        ("-1", []),
        ("2,-1,3", ["2"]),
        ("0,9,1", ["0"]),  # CUDA stops at what is not there
        ("GPU-00000002-aaaa,GPU-00000001", ["GPU-00000002-aaaa", "GPU-00000001"]),
    ],
)
def test_only_those_that_this_process_may_see(tmp_path: Path, visible: str, expected: list[str]) -> None:
    assert names({**machine_with(tmp_path, 8), "CUDA_VISIBLE_DEVICES": visible}) == expected


def test_a_gpu_that_is_cut_up_is_its_slices(tmp_path: Path) -> None:
    environment = machine_with(tmp_path, 2, slices=2)

    whole, one, other = gpus_here(environment, torch=CUDA)
    assert [whole.name, one.name, other.name] == ["0", "MIG-00000000-bbbb", "MIG-00000001-bbbb"]
    assert (whole.is_slice, one.is_slice, one.memory) == (False, True, 40 << 30)
    assert names({**environment, "CUDA_VISIBLE_DEVICES": other.name}) == [other.name]


def test_to_a_torch_for_cpus_there_are_none(tmp_path: Path) -> None:
    assert names(machine_with(tmp_path, 8), torch="2.13.0+cpu") == []


def test_where_nobody_tells_the_variable_is_believed(tmp_path: Path) -> None:
    assert gpus_here({"PATH": str(tmp_path)}, torch=CUDA, devices=tmp_path) == ()
    assert names({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}) == ["0", "1"]


def test_gpus_of_which_only_the_driver_tells_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    environment = {"PATH": str(tmp_path)}
    assert gpus_here(environment, torch=CUDA, devices=tmp_path) == ()
    (tmp_path / "nvidia3").touch()  # a container's only one
    with pytest.raises(ResourceError, match=r"no nvidia-smi.*NVIDIA_DRIVER_CAPABILITIES=.*CUDA_VISIBLE_DEVICES"):
        gpus_here(environment, torch=CUDA, devices=tmp_path)
    assert gpus_here(environment, torch="2.13.0+cpu", devices=tmp_path) == ()
    for visible, number in (("", 0), ("3", 1)):
        named = gpus_here({**environment, "CUDA_VISIBLE_DEVICES": visible}, torch=CUDA, devices=tmp_path)
        assert len(named) == number


def test_a_driver_that_is_broken_is_told(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(ResourceError, match=r"nvidia-smi fails .*exit status 9.*fix the driver"):
        gpus_here({"PATH": str(tmp_path)}, torch=CUDA)


@pytest.mark.parametrize(("capability", "has"), [("9.0", True), ("8.0", True), ("7.5", False), ("[N/A]", True)])
def test_gpus_older_than_ampere_have_no_products_of_bfloat16(tmp_path: Path, capability: str, has: bool) -> None:
    environment = machine_with(tmp_path, 2, capability=capability)
    assert [gpu.has_bfloat16 for gpu in gpus_here(environment, torch=CUDA)] == [has, has]
    [one] = gpus_here({**environment, "CUDA_VISIBLE_DEVICES": "1"}, torch=CUDA)
    assert one.has_bfloat16 is has
