"""The script for a machine with a GPU, in its most reduced form: each part says what it is to say, and ends cleanly."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.gpu_check import attention, copies, deaths, routes, starts, steps, versions
from bench.gpu_check.__main__ import Part, run_part
from bench.gpu_check.rows import Outcome, Row, Scale, as_json, table
from bench.gpu_check.shares import kind_of
from bench.learner_gpu import SIZES
from streamrl.learner.metrics.gpu import peak_of
from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]
REDUCED = Scale(device=torch.device("cpu"))
COMMAND = [sys.executable, "-m", "bench.gpu_check", "--reduced"]


def test_a_step_is_told_with_its_flops_and_its_planned_peak() -> None:
    rows = {row.what: row for row in steps.check(REDUCED)}
    kinds = ("attention", "matrix products", "optimizer", "copies and casts", "elementwise and sums", "other kernels")
    assert list(rows) == ["tiny: planned peak", "tiny: useful", *(f"tiny: {kind}" for kind in kinds)]
    assert all(rows[f"tiny: {kind}"].value > 0 for kind in kinds[:-1])
    assert rows["tiny: useful"].value > 0
    assert "layers computed twice" in rows["tiny: useful"].note


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "matrix products"),
        ("void flash::flash_bwd_dq_dk_dv_loop_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda>", "elementwise and sums"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 8>", "elementwise and sums"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("ncclDevKernel_AllGather_RING_LL", "other kernels"),
    ],
)
def test_a_kernel_counts_by_what_its_name_says(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_on_a_gpu_the_sizes_are_those_that_people_train() -> None:
    found = {name: (case.size.hidden, case.size.layers, case.mfu) for name, case in steps.CASES.items()}
    assert found == {
        "1.5B, all activations": (1536, 28, 0.45),
        "1.5B, checkpointing": (1536, 28, 0.40),
        "1.5B, all activations, not compiled": (1536, 28, None),
        "1.5B, checkpointing, not compiled": (1536, 28, None),
        "7B-shaped, 4 layers": (3584, 4, None),
        "7B-shaped, 8 layers": (3584, 8, None),
    }
    assert steps.CASES["1.5B, checkpointing"].size is SIZES["1.5B"]


def test_attention_agrees_and_versions_and_copies_are_timed() -> None:
    assert {row.verdict for row in attention.check(REDUCED)} == {"ok", ""}
    assert [row.what for row in versions.publish(REDUCED)] == ["tiny: the loop waits", "tiny: then on its way"]
    assert all(row.unit == "GB/s" and row.value > 0 for row in copies.check(REDUCED))


def test_each_place_of_weights_is_started_trained_saved_and_restored() -> None:
    rows = {row.what: row for row in starts.check(REDUCED)}
    told = ("steps made", "checkpoint copied", "not restored", "steps after it")
    reference = "reference on the host: largest difference"
    assert [*rows] == [*(f"{place}: {what}" for place in starts.PLACES for what in told), reference]
    assert {row.verdict for row in rows.values()} == {"ok", ""}


@pytest.mark.long
def test_a_mixture_is_nearer_to_its_engine_by_the_engines_routes() -> None:
    rows = {row.what: row for row in routes.check(REDUCED)}
    assert {row.verdict for row in rows.values()} == {"ok", ""}
    assert rows["compare: routes that differ"].value > 0


def test_what_a_run_says_of_paths_that_only_a_gpu_has_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    metrics = [{"step": 1, "policy/fresh_mismatch": 0.004}, {"step": 2, "policy/fresh_mismatch": 0.01}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics))
    (tmp_path / "logs" / "worker-0.log").write_text(
        json.dumps({"event": "loads_all_weights", "reason": "its layers are packed"}) + "\n"
    )
    (tmp_path / "logs" / "worker-0.out").write_text("2026 [warning  ] memory not pinned  cuda_error=1\n")
    rows = {row.what: row for row in deaths.told_by(tmp_path)}
    apart = rows["engine and learner apart"]
    assert (apart.value, apart.verdict) == (0.01, "ok")
    in_place = rows["changes not written in their place"]
    assert (in_place.value, in_place.verdict, in_place.note) == (1, "MISSED", "its layers are packed")
    assert rows["memory not pinned"].verdict == "MISSED"
    assert {rows[what].verdict for what in ("loads rejected", "engines that failed")} == {"ok"}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100X", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("some other", None),
    ],
)
def test_peaks_are_those_of_dense_bf16_by_the_name_of_the_card(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_missed_goal_and_a_part_that_did_not_run_are_told() -> None:
    rows = (
        Row(what="MFU", value=0.3, unit="", goal=0.45),
        Row(what="orphans", value=0, unit="", goal=0, better="lower"),
    )
    shown = "\n".join(table([Outcome(part="steps", rows=rows), Outcome(part="reload", rows=(), not_run="no vllm")]))
    assert ">= 0.45 MISSED" in shown
    assert "<= 0 ok" in shown
    assert "NOT RUN: no vllm" in shown


def test_a_figure_that_could_not_be_measured_is_told_as_missed() -> None:
    row = Row(**json.loads(Row(what="apart", value=math.nan, unit="nats", goal=0.05, better="lower").to_json()))
    outcome = Outcome(part="deaths", rows=(row,))
    [part] = json.loads(as_json([outcome], "a machine"))["parts"]
    assert (part["rows"][0]["value"], part["rows"][0]["verdict"]) == (None, "MISSED")
    assert list(table([outcome]))[1].split() == ["apart", "-", "nats", "<=", "0.05", "MISSED"]


def test_what_misses_a_package_is_named_and_does_not_begin() -> None:
    part = Part("nowhere:at_all", 1.0, ("no_such_package",), "")
    assert run_part("copies", part, reduced=True) == Outcome(
        part="copies", rows=(), not_run="no_such_package is not installed"
    )


def test_a_part_that_takes_too_long_or_fails_is_named_with_the_reason() -> None:
    assert run_part("copies", Part("", 0.01, (), ""), reduced=True).not_run == "it took longer than 0.01 s"


def test_the_command_runs_parts_in_processes_and_tells_machines() -> None:
    done = subprocess.run(
        [*COMMAND, "copies", "--json"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert "the figures mean nothing" in told["machine"]
    [part] = told["parts"]
    assert (part["part"], part["not_run"]) == ("copies", "")
    assert {row["unit"] for row in part["rows"]} == {"GB/s"}
    assert all(f"{row['what']}: {row['value']:.4g} GB/s" in done.stderr for row in part["rows"]), "and as they came"


def test_ctrl_c_ends_it_and_the_part_at_work() -> None:
    with subprocess.Popen(
        [*COMMAND, "steps"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Where the tests run behind a shell, it is ignored; in a terminal nothing is.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as started:
        wait_until(lambda: bool(children(started.pid)), timeout_s=240, description="a part at work")
        at_work = children(started.pid)
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=240) != 0
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in at_work), timeout_s=240, description="it is gone"
    )


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    try:
        return [int(child) for task in os.listdir(tasks) for child in (tasks / task / "children").read_text().split()]
    except OSError:
        return []
