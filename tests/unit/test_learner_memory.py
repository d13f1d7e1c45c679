"""What the learner will take of its GPU: the closed form agrees with the learner's own code, and refuses in time."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.memory import planned, sizes_of
from bench.memory_cases import CASES
from bench.memory_run import run
from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.config.schema import Teacher
from streamrl.errors import ResourceError
from streamrl.learner.planning import layouts
from streamrl.learner.planning.layouts import Machine, Task
from streamrl.learner.planning.memory import plan, refuse_too_large
from streamrl.learner.preflight.examine import examine
from streamrl.recipe.losses import Losses, TokenBatch, needs
from tests.gpus_world import machine_with
from tests.stand_ins import make_stand_in

CONF = Path(__file__).parents[2] / "conf"
SHORT = CASES["1.5B full, 1 GPU, short"]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_closed_form_is_within_a_tenth_of_what_the_learners_code_holds(checkpointing: bool) -> None:
    case = replace(SHORT, checkpointing=checkpointing)
    measured = run(case)

    assert planned(case).peak == pytest.approx(max(measured.values()), rel=0.1)
    assert planned(case).always == pytest.approx(measured["step"], rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "8B at 128k, 8 GPUs, context over 8, short",
        "32B at 16k, 16 GPUs, tensor over 8, short",
        "30B-A3B full, 8 GPUs, short",
        "30B-A3B full, 8 GPUs, experts over 8, short",
        "gpt-oss-120b at 8k, 32 GPUs, experts over 32, context over 8, short",
    ],
    ids=["context", "tensor", "mixture", "divided experts", "its own attention"],
)
def test_the_closed_form_knows_what_ranks_share(name: str) -> None:
    case = CASES[name]
    if dist.is_initialized():  # of a single rank, by a test before
        dist.destroy_process_group()
    try:
        measured = run(case)
    finally:
        dist.destroy_process_group()
    assert planned(case).peak == pytest.approx(max(measured.values()), rel=0.1)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.layers is None])
def test_what_is_meant_for_gpus_of_80_gb_fits_there_with_headroom(name: str) -> None:
    found = planned(CASES[name])
    assert found.peak < found.needed < 80e9


def test_of_divided_experts_a_rank_gathers_its_own_and_may_get_more_tokens_than_others() -> None:
    whole = CASES["30B-A3B full, 8 GPUs"]
    shared = replace(whole, experts=8)
    experts = sizes_of(whole).experts
    assert experts is not None
    assert planned(shared).always == planned(whole).always
    assert planned(whole).in_layer - planned(shared).in_layer > 8 * experts.weights * 7 // 8
    headroom = [planned(case).needed - 1.05 * planned(case).peak for case in (whole, shared)]
    assert headroom[1] >= headroom[0]
    assert planned(whole).uneven == 0 < planned(shared).uneven


def test_a_rank_that_cannot_fit_is_refused_with_both_numbers_and_the_remedy() -> None:
    case = CASES["7B full, 4 GPUs"]
    refuse_too_large(sizes_of(case), case.config, ranks=4, room=50 * 10**9)
    refuse_too_large(sizes_of(case), case.config, ranks=8, room=40 * 10**9)  # on two hosts
    told = r"a rank needs 48\.4 GB .* 40\.0 GB are available: lower training\.micro_batch_tokens, .*masters"
    with pytest.raises(ResourceError, match=told):
        refuse_too_large(sizes_of(case), case.config, ranks=4, room=40 * 10**9)


def test_a_sample_longer_than_a_micro_batch_is_planned_as_one_of_its_own() -> None:
    case = CASES["7B full, 4 GPUs"]
    sizes, short = sizes_of(case), case.config
    long = short.model_copy(update={"sampling": short.sampling.model_copy(update={"max_tokens": 40_000})})
    longest = 40_000 + long.data.max_prompt_tokens
    training = short.training.model_copy(update={"micro_batch_tokens": longest})

    found = plan(sizes, long)

    assert found == plan(sizes, long.model_copy(update={"training": training}))
    assert found.kept > 2 * plan(sizes, short).kept
    machine = Machine(gpus=4, memory=80 * 10**9, per_host=4)
    assert found == layouts.planned(long.learner.layout, Task.of(sizes, long), machine), "doctor says one thing"
    with pytest.raises(ResourceError, match=r"sampling\.max_tokens if a single sample may be longer"):
        refuse_too_large(sizes, long, ranks=4, room=found.peak - 1)


def test_masters_on_the_host_leave_the_gpu_to_activations() -> None:
    config = CASES["7B full, 4 GPUs"].config
    model, sizes = config.model.model_copy(update={"masters": "cpu"}), sizes_of(CASES["7B full, 4 GPUs"])
    on_host = plan(sizes, config.model_copy(update={"model": model}))
    assert on_host.always == 2 * sizes.trained // 4, "its reference alone"
    assert on_host.peak == plan(sizes, config).peak - 16 * sizes.trained // 4


def test_gradients_wait_on_the_gpu_for_replicas_to_add_them_up_wherever_masters_are() -> None:
    case = CASES["7B full, 4 GPUs"]
    sizes, config = sizes_of(case), case.config
    model = config.model.model_copy(update={"masters": "cpu"})
    learner = config.learner.model_copy(update={"layout": schema.Layout(replicas=2)})
    alone = config.model_copy(update={"model": model})
    doubled = alone.model_copy(update={"learner": learner})
    found = plan(sizes, doubled, ranks=8)
    assert found.always == plan(sizes, alone, ranks=4).always + 4 * sizes.trained // 4
    assert plan(sizes, config.model_copy(update={"learner": learner}), ranks=8) == plan(sizes, config, ranks=4)
    machine = Machine(gpus=8, memory=80 * 10**9, per_host=4)
    assert found == layouts.planned(learner.layout, Task.of(sizes, doubled), machine), "doctor says one thing"


@pytest.mark.parametrize(
    ("algorithm", "is_kept"),
    [
        (schema.Algorithm(), True),
        (schema.Algorithm(kl=schema.Kl(coefficient=0.0)), False),
        (schema.Algorithm(kl=schema.Kl(placement="none")), False),
        (schema.Algorithm(name="rejection_sampling"), False),
        (schema.Algorithm(advantages="none"), False),
        (schema.Algorithm(loss=f"{__name__}:towards_reference", kl=schema.Kl(placement="none")), True),
    ],
    ids=["KL", "coefficient 0", "no KL", "rejection sampling", "no advantages", "own loss"],
)
def test_a_reference_counts_where_one_is_loaded(algorithm: schema.Algorithm, is_kept: bool) -> None:
    config = CASES["7B full, 4 GPUs"].config.model_copy(update={"algorithm": algorithm})
    sizes = sizes_of(CASES["7B full, 4 GPUs"])
    assert plan(sizes, config).always == (16 + (2 if is_kept else 0)) * sizes.trained // 4


@needs("reference")
def towards_reference(batch: TokenBatch) -> Losses:
    return batch.logprobs, {}


def test_inputs_of_layers_that_wait_on_the_host_are_those_of_two_layers() -> None:
    case = CASES["8B at 128k, 8 GPUs, context over 8"]
    sizes, config = sizes_of(case), case.config
    on_host = config.model_copy(update={"model": config.model.model_copy(update={"activations": "cpu"})})
    assert plan(sizes, on_host).kept == plan(sizes, config).kept * 2 // sizes.layers


def test_more_ranks_and_checkpointing_take_less_and_adapters_least() -> None:
    full = CASES["7B full, 4 GPUs"]
    assert planned(replace(full, ranks=8)).peak < planned(full).peak < planned(replace(full, checkpointing=False)).peak
    assert planned(replace(full, ranks=1, lora=True)).always < planned(replace(full, ranks=1)).always / 3


@pytest.mark.parametrize(
    ("gigabytes", "level", "told"),
    [
        (80, "ok", "36.5 GB peak per rank (calculated), 42.7 GB available on GPU 0"),
        (24, "error", "available on GPU 0"),
        (160, "ok", "72.0 GB peak per rank"),  # with all activations
    ],
)
def test_a_learner_that_does_not_fit_is_refused_before_its_weights_are_loaded(
    gigabytes: int, level: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.gpus.version", lambda _name: "2.13.0+cu130")
    monkeypatch.setenv("PATH", machine_with(tmp_path, 1, mebibytes=gigabytes * 1019)["PATH"])
    monkeypatch.setenv("CXX", sys.executable)  # a compiler, for all that it is asked
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7"}\n' * 64)
    model = make_stand_in(tmp_path / "model", "1.5B")
    asked = [f"model.path={model}", f"data.train={prompts}", f"data.validation={prompts}"]
    findings = {one.name: one for one in examine(load_config(CONF / "gpu_qwen_1.5b.yaml", asked).config)}
    found = findings["learner on GPU"]
    assert found.level == level
    assert told in found.evidence
    assert findings["layout"].level == level
    assert ("as configured" if level == "ok" else "none of 1 GPU fits") in findings["layout"].evidence


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of a run of 32B whose files are here."""
    folder = tmp_path_factory.mktemp("large")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7"}\n' * 64)
    model = make_stand_in(folder / "model", "32B")
    return [f"model.path={model}", f"data.train={prompts}", f"data.validation={prompts}"]


@pytest.mark.parametrize(
    ("hosts", "level", "told"),
    [
        (range(1, 3), "error", r"--nodes 1:2: with 1 host .* peak per rank .*; start with --nodes 2$"),
        (range(1, 5), "error", r"--nodes 1:4: with 1 host .* peak per rank .*; start with --nodes 2:4$"),
        (range(1, 2), "error", r"peak per rank .* available on GPU 0.*; lower training\.micro_batch_tokens"),
        (range(2, 3), "ok", r"peak per rank"),
        (None, "warning", r"if this host is the only one$"),
    ],
    ids=["of two", "of four", "alone", "both", "of nobody knows how many"],
)
def test_hosts_that_a_learner_may_be_left_with_must_have_room_for_it(
    large: list[str],
    hosts: range | None,
    level: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.gpus.version", lambda _name: "2.13.0+cu130")
    monkeypatch.setenv("PATH", machine_with(tmp_path, 8)["PATH"])
    config = load_config(CONF / "gpu_qwen_32b.yaml", large).config
    [found] = [one for one in examine(config, "learner", hosts) if one.name == "learner on GPU"]
    assert (found.level, bool(re.search(told, found.evidence))) == (level, True), found.evidence


def test_a_teacher_beside_the_policy_is_counted_and_one_on_the_host_less() -> None:
    case, large = CASES["1.5B full, 1 GPU"], sizes_of(CASES["32B full, 16 GPUs"])
    taught = {
        place: case.config.model_copy(update={"teacher": Teacher(path="t", place=place)}) for place in ("device", "cpu")
    }
    alone = plan(sizes_of(case), case.config)

    beside = plan(sizes_of(case), taught["device"], teacher=large)

    weights = 2 * (large.trained + large.frozen)
    assert beside.always == alone.always + weights
    assert beside.peak == beside.always + max(alone.peak - alone.always, beside.teaching)
    assert plan(sizes_of(case), taught["cpu"], teacher=large).always == alone.always
    with pytest.raises(ResourceError, match=r"teacher\.place to cpu"):
        refuse_too_large(sizes_of(case), taught["device"], ranks=1, room=80 * 10**9, teacher=large)
