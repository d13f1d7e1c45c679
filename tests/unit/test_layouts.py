"""Which layout the planner chooses for some GPUs, why nothing smaller, and what it tells where nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml

from bench.memory import counted, planned, sizes_of
from bench.memory_cases import Case, model_config
from streamrl.config.schema import Layout
from streamrl.learner.parallel.tensor import refuse_tensor
from streamrl.learner.planning.advice import describe, suggest_layout
from streamrl.learner.planning.layouts import Machine, Option, Task, options, ways_out
from streamrl.learner.planning.traffic import sent
from streamrl.terminal import size

WHOLE = describe(Layout())
ROOM = int(0.9 * 80 * (1019 << 20))  # of a GPU of 80 GB
LONG = Case(size="8B", ranks=8, tokens=131_072)
DENSE = Case(size="32B", ranks=32, tokens=32_768)
QWEN = Case(size="30B-A3B", ranks=8, tokens=8192, reference=False)
GPT = Case(size="gpt-oss-120b", ranks=32, tokens=8192, reference=False)
SMALL = Case(size="1.5B", ranks=1)
LARGE = Case(size="405B", ranks=256, tokens=8192, reference=False)
SHAPES = {
    "8B at 128k on 8": (LONG, Layout(context=2)),
    "32B at 32k on 32": (DENSE, Layout()),
    "30B-A3B on 8": (QWEN, Layout(experts=8)),
    "gpt-oss-120b on 32": (GPT, Layout(context=8, experts=32)),
    "1.5B on 1": (SMALL, Layout()),
    "405B on 256": (LARGE, Layout(context=2, tensor=4)),
}


def task(case: Case) -> Task:
    return Task.of(sizes_of(case), case.config)


def machine(case: Case, *, memory: int = ROOM) -> Machine:
    return Machine(gpus=case.ranks, memory=memory, per_host=8)


def choice(case: Case) -> Option:
    return options(task(case), machine(case))[0]


def under(case: Case, layout: Layout) -> Case:
    assert layout.replicas == 1
    return replace(case, context=layout.context, experts=layout.experts, tensor=layout.tensor)


@pytest.mark.parametrize("name", SHAPES)
def test_of_six_learners_each_has_its_layout(name: str) -> None:
    case, layout = SHAPES[name]
    chosen = choice(case)
    assert chosen.fits
    assert chosen.layout == layout
    assert chosen.planned == planned(under(case, layout))


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_planned_for_each_is_what_the_learners_own_code_holds(name: str) -> None:
    """With four layers of it; with all of them `bench memory` does."""
    case, layout = SHAPES[name]
    if dist.is_initialized():  # of a single rank, by a test before
        dist.destroy_process_group()
    short = replace(under(case, layout), layers=4)
    assert planned(short).peak == pytest.approx(max(counted(short).values()), rel=0.1)


def test_it_is_told_with_what_is_to_be_pasted_and_each_smaller_one_with_why_not() -> None:
    first, *others = suggest_layout(task(GPT), machine(GPT))
    assert first.level == "ok"
    assert first.evidence.startswith("context 8, experts 32 on 32 GPUs: ")
    assert f"of {size(ROOM)} available" in first.evidence
    assert yaml.safe_load(first.remedy) == {"learner": {"processes": 8, "layout": {"context": 8, "experts": 32}}}
    told = {other.evidence.partition(":")[0]: other.evidence for other in others}
    assert [name for name in told if name.endswith("experts 32")] == [
        "context 4, experts 32",
        "context 2, experts 32",
        "experts 32",
    ]
    assert re.search(rf"it needs \S+ GB of {size(ROOM)} available", told["context 4, experts 32"])
    assert re.search(r"it sends .* per token, the choice .*", told["context 8, experts 16"])


def test_what_fits_and_is_not_chosen_sends_more() -> None:
    [_, *others] = options(task(QWEN), machine(QWEN))
    for option in others:
        assert not option.fits or option.sent >= choice(QWEN).sent
    told = [finding.evidence for finding in suggest_layout(task(QWEN), machine(QWEN))]
    assert any(re.fullmatch(r"experts 4: it sends .* per token, the choice .*", line) for line in told)


def test_a_layout_that_is_set_already_is_not_to_be_pasted() -> None:
    first, *_ = suggest_layout(task(QWEN), machine(QWEN), configured=Layout(experts=8))
    assert first.evidence.startswith("as configured, experts 8 on 8 GPUs: ")
    assert first.remedy == ""


def test_layers_too_large_for_a_rank_are_shared_within_a_host_and_it_is_told_why() -> None:
    chosen = choice(LARGE).layout
    assert chosen.tensor > 1
    first, shared, *others = suggest_layout(task(LARGE), machine(LARGE))
    assert yaml.safe_load(first.remedy)["learner"]["layout"]["tensor"] == chosen.tensor
    assert re.search(r"sends per token \S+ [GM]B within its host and \S+ [GM]B to others", first.evidence)
    assert shared.name == f"layout, tensor {chosen.tensor}"
    told = re.match(r"(\S+) GB of weights, .* share, and (\S+) GB in a whole one", shared.evidence)
    assert told is not None
    assert float(told[1]) < float(told[2])
    assert any(re.search(r"tensor 2: it needs", other.evidence) for other in others)


def test_ranks_that_share_layers_are_of_one_host() -> None:
    for per_host, most in ((8, 8), (4, 4), (6, 2)):
        hosts = Machine(gpus=24, memory=ROOM, per_host=per_host)
        assert max(option.layout.tensor for option in options(task(LARGE), hosts)) == most


@pytest.mark.parametrize(
    ("case", "numbers"), [(GPT, {1}), (QWEN, {1, 2, 4}), (replace(LARGE, lora=True), {1, 2, 4, 8})]
)
def test_what_the_learner_refuses_is_not_planned(case: Case, numbers: set[int]) -> None:
    """Of gpt-oss transformers has no plan."""
    assert {option.layout.tensor for option in options(task(case), machine(case))} == numbers


def test_heads_that_ranks_share_are_shared_further_by_those_that_share_samples() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(DENSE.size, 1))
    found = {option.layout for option in options(task(DENSE), machine(DENSE))}
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    for layout in found:
        refuse_tensor(model, layout)
    assert Layout(tensor=8, context=5) not in found, "32 ranks are no multiple of five"
    assert Layout(tensor=4, context=16) not in found, "ten heads a rank"
    assert Layout(tensor=4, context=8) in found, "some of them empty"
    assert Layout(tensor=4, context=2) in found


def test_what_goes_to_other_hosts_is_told_apart() -> None:
    sizes, config = sizes_of(DENSE), DENSE.config
    one, four = (
        sent(Layout(tensor=8), sizes, config, ranks=32, per_host=per_host, tokens=DENSE.tokens) for per_host in (32, 8)
    )
    assert one.far == 0.0 < four.far
    assert one.near + one.far == pytest.approx(four.near + four.far)
    # Passes, layers, sums in each, there and back, bytes, width, ranks beside this one.
    assert four.near > 3 * 64 * 2 * 2 * 2 * 5120 * 7
    whole = sent(Layout(), sizes, config, ranks=32, per_host=8, tokens=DENSE.tokens)
    outermost = (sizes.trained - sizes.shared.weights) * 8 * 24 / 32 / DENSE.tokens
    assert four.far == pytest.approx(whole.far + 7 * outermost), "of layers as much: eight ranks gather one together"


def test_a_micro_batch_holds_the_longest_sample() -> None:
    case = replace(SMALL, tokens=1024, longest=4096)
    assert task(case).tokens == 4096
    [first] = suggest_layout(task(case), machine(case))
    assert yaml.safe_load(first.remedy)["training"] == {"micro_batch_tokens": 4096}


def test_copies_are_kept_by_hosts_where_they_fit_and_nowhere_within_one() -> None:
    case = replace(SMALL, ranks=16)
    assert choice(case).layout == Layout(replicas=2)
    assert all(o.layout.replicas == 1 for o in options(task(case), Machine(gpus=16, memory=ROOM, per_host=16)))
    [first, *_] = suggest_layout(task(case), machine(case))
    assert "on each of 2 hosts" in first.remedy


def test_long_micro_batches_are_dearer_to_send_than_experts() -> None:
    """Weights are gathered once for each, and hidden states sent for each token."""
    whole, sent = Layout(), Layout(experts=8)
    for tokens, better in ((8192, sent), (262_144, whole)):
        case = replace(QWEN, tokens=tokens, longest=8192)
        found = {o.layout.experts: o.sent for o in options(task(case), machine(case)) if o.layout.context == 1}
        assert min(found, key=lambda experts: found[experts]) == better.experts


def test_what_no_layout_holds_is_told_with_what_would() -> None:
    case = replace(DENSE, ranks=8)
    [told] = suggest_layout(task(case), machine(case))
    assert told.level == "error"
    assert re.match(
        r"none of 8 GPUs fits: the smallest, context 8, needs 93\.7 GB of 76\.9 GB available", told.evidence
    )
    assert "with 16 GPUs: " in told.remedy
    assert "with model.masters=cpu: " in told.remedy
    assert "with adapters alone (model.lora): " in told.remedy
    assert "checkpointing" not in told.remedy, "it is on"


def test_shorter_samples_and_checkpointing_are_told_where_they_would_do() -> None:
    case = replace(LONG, ranks=4, checkpointing=False, reference=False)
    ways = {way.change: way.option for way in ways_out(task(case), machine(case))}
    assert all(option.fits for option in ways.values())
    [shorter] = [describe for describe in ways if describe.startswith("samples of at most")]
    longest = int(shorter.split()[4])
    at_most = replace(case, tokens=longest), replace(case, tokens=longest + 1024)
    assert [choice(each).fits for each in at_most] == [True, False]


def test_a_model_of_few_heads_or_none_to_share_is_not_shared_further() -> None:
    sizes = replace(sizes_of(LONG), heads=9, kv_heads=3)
    for may_share, contexts in ((True, {1, 2, 3, 4, 6}), (False, {1})):
        known = replace(task(LONG), sizes=replace(sizes, may_share=may_share))
        found = {o.layout.context for o in options(known, Machine(gpus=12, memory=ROOM, per_host=12))}
        assert found == contexts
