"""What runs pods as kubelet does, without podman: quantities, and what is said where something is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.images.composed import tmpfs
from tests.images.engine import why_not
from tests.images.outside import named
from tests.images.volumes import num_bytes, num_cores


@pytest.mark.parametrize(("said", "meant"), [("128Mi", 2**27), ("2Gi", 2**31), ("2G", 2 * 10**9), ("512", 512)])
def test_a_quantity_of_memory_is_read_as_kubernetes_writes_it(said: str, meant: int) -> None:
    assert num_bytes(said) == meant


def test_a_share_of_a_core_is_read_as_kubernetes_writes_it() -> None:
    assert (num_cores("100m"), num_cores("2")) == (0.1, 2.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is asked for first")
def test_what_is_missing_for_images_is_named_with_its_package() -> None:
    missing = why_not({"no-such-program": "its-package", "sh": "dash"})
    assert missing == "install what it needs: apt-get install --no-install-recommends its-package"


def test_a_folder_in_memory_has_dockers_options_unless_the_contrary_is_told() -> None:
    assert tmpfs("/tmp") == "/tmp:rw,noexec,nosuid,nodev,mode=1777"
    assert tmpfs("/tmp:exec") == "/tmp:rw,nosuid,nodev,mode=1777,exec"


def test_a_word_names_its_file_where_it_lies_once() -> None:
    places = {"/models": Path("/tmp/claims/models"), "/tmp": Path("/tmp/pods/tmp")}
    assert named("--model=/models/policy", places) == "--model=/tmp/claims/models/policy"
    assert named("--dir=/tmp", places) == "--dir=/tmp/pods/tmp"
    assert named("--url=/modelsoup", places) == "--url=/modelsoup"
