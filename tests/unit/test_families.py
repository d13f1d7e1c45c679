"""Log-probs and gradients of packed samples are those of transformers' own model, family by family."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError
from streamrl.learner.loading.build import begin_model, load_model
from streamrl.learner.loading.load import fill, load_policy, load_reference, make_policy
from streamrl.learner.model.lora import merged_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.settle import settle
from streamrl.learner.packing.attention import VARLEN
from streamrl.learner.packing.pack import pack
from streamrl.learner.packing.ways import Way
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.tiny_families import FAMILIES, make_family
from tests.tiny_models import make_model
from tests.unit.test_packing import piece

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TOLERANCE = 1e-3
PIECES = [piece(i, 2 + i // 4, 1 + (5 * i) % 11, group=i // 4) for i in range(12)]
# What is slow to make, or like another, waits for the long tests.
LONG = {
    *("qwen2_moe", "granitemoehybrid", "zamba2", "jamba", "bamba", "glm4_moe", "falcon_mamba", "codegen"),
    *("hy_v3", "laguna", "lfm2_moe", "minimax_m2"),
}
TABLE = Path("docs/models.md")
Learnt = tuple[torch.Tensor, dict[str, torch.Tensor]]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' older families
    pytest.mark.usefixtures("quiet_transformers"),
]


def families() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FAMILIES]


def policy_of(folder: Path, **model: object) -> Policy:
    settings = schema.Model.model_validate({"path": str(folder), "dtype": "float32", **model})
    return load_policy(learner_config(folder, model=settings), ALONE, ())


def packed(policy: Policy) -> Learnt:
    """(log-probs sample by sample, gradients of a sum that weighs each differently)"""
    found = []
    for batch in pack(PIECES, max_tokens=60, shape=policy.shape):
        logp = policy(batch).logp
        (logp * weights(batch.sample, batch.position)).sum().backward()
        found += list(zip(batch.sample.tolist(), batch.position.tolist(), logp.tolist(), strict=True))
    return torch.tensor([logp for *_, logp in sorted(found)]), gradients(policy.model)


def plain(folder: Path) -> Learnt:
    """The same from transformers alone: each sequence by itself, and autograd through its own logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for one in PIECES:
        ids = torch.tensor([[*one.prompt_ids.tolist(), *one.token_ids.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[0, len(one.prompt_ids) :, None])[:, 0]
        position = torch.arange(len(logp))
        (logp * weights(torch.full_like(position, one.sample), position)).sum().backward()
        found.append(logp.detach())
    return torch.cat(found), gradients(model)


def weights(sample: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return (1 + sample % 3) * (1 + position)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def assert_same(ours: Learnt, theirs: Learnt) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=TOLERANCE, rtol=0)
    for name in ours[1].keys() | theirs[1].keys():
        a, b = (learnt[1].get(name, torch.zeros(())) for learnt in (ours, theirs))
        assert (a - b).norm() < TOLERANCE * (b.norm() + 1), name  # a bias of keys has none but rounding


def table() -> dict[str, tuple[str, str]]:
    """How a family is asked, and whether varlen is had for it, as the documentation has it."""
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| (yes|no) \|", TABLE.read_text(), re.MULTILINE)
    return {family: (way, varlen) for family, way, varlen in rows}


@pytest.mark.parametrize("family", families())
def test_what_a_family_learns_is_what_transformers_says(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    policy = policy_of(folder)
    assert str(policy.way) == table()[family][0]
    assert_same(packed(policy), plain(folder))
    assert policy.flops.of_pass(PIECES) > 0


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_is_had_where_the_table_says_so(tmp_path: Path, family: str) -> None:
    policy = policy_of(make_family(tmp_path / "model", family), attention="varlen")
    assert table()[family][1] == ("yes" if policy.way.attention == VARLEN else "no")


def test_the_table_names_every_family_that_is_tried() -> None:
    assert set(table()) == set(FAMILIES)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "phi", "mamba2"])
def test_the_wish_for_lengths_and_for_less_memory_changes_nothing_of_it(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    policy = policy_of(folder, attention="varlen", gradient_checkpointing=True)
    assert_same(packed(policy), plain(folder))


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi", "lfm2"])
def test_in_double_precision_likewise(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    ours, theirs = packed(policy_of(folder, dtype="float64")), plain(folder)
    assert_same((ours[0].float(), {name: g.float() for name, g in ours[1].items()}), theirs)


@pytest.mark.parametrize("family", ["gemma2", "granite", "mamba2"])
def test_a_reference_is_asked_as_the_policy_is(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    policy = policy_of(folder)
    reference = load_reference(learner_config(folder), ALONE, (), like=policy)
    assert (reference.way, reference.head) == (policy.way, policy.head)
    with torch.no_grad():
        for batch in pack(PIECES, max_tokens=60, shape=policy.shape):
            torch.testing.assert_close(reference(batch).logp, policy(batch).logp, atol=1e-5, rtol=0)


def test_logits_that_no_head_of_ours_makes_are_the_models_own(tmp_path: Path) -> None:
    policy = policy_of(make_model(tmp_path / "model"))
    assert policy.way == Way(layout="shared", attention="sdpa")
    policy.model.get_output_embeddings().register_forward_hook(lambda _module, _args, out: out.sinh())
    with capture_logs() as logs:
        settle(policy, ALONE)
    assert str(policy.way) == "rows, own logits"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "sequences are not packed: correct, but slower"
    ]
    for batch in pack(PIECES, max_tokens=60, shape=policy.shape):
        policy(batch).logp.sum().backward()
        for sample in batch.sample.unique().tolist():
            one = PIECES[sample]
            ids = torch.tensor([*one.prompt_ids.tolist(), *one.token_ids.tolist()])
            own = policy.plain(ids).logp[-len(one.token_ids) :]
            torch.testing.assert_close(policy(batch).logp[batch.sample == sample], own, atol=TOLERANCE, rtol=0)


def test_a_window_that_only_a_long_sequence_shows_is_kept(tmp_path: Path) -> None:
    """Wider than what is tried at start; a mask without it is found out all the same."""
    folder = make_family(tmp_path / "model", "mistral", sliding_window=100)
    policy = policy_of(folder)
    assert policy.way.layout == "shared"
    policy._masks = lambda batch: batch.attention_mask()
    settle(policy, ALONE)
    assert policy.way.layout == "packed"


def test_a_model_that_sees_the_future_is_refused_in_one_line(tmp_path: Path) -> None:
    policy = policy_of(make_model(tmp_path / "model"))
    inner = policy.model.model.layers[0]
    inner.register_forward_hook(lambda _module, _args, out: out + out.mean(dim=1, keepdim=True))
    with pytest.raises(DataError, match=r"model\.path .*what comes after it") as refused:
        settle(policy, ALONE)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_noisy_while_it_trains_is_refused(tmp_path: Path) -> None:
    policy = policy_of(make_model(tmp_path / "model"))
    policy.model.model.norm.register_forward_hook(
        lambda module, _args, out: out * (1 + 0.1 * torch.randn_like(out)) if module.training else out
    )
    with pytest.raises(DataError, match=r"in training mode; turn noise and dropout off"):
        settle(policy, ALONE)


def test_what_is_no_causal_model_is_refused_in_one_line(tmp_path: Path) -> None:
    for family in ("t5", "vit"):
        config = transformers.AutoConfig.for_model(family)
        config.save_pretrained(tmp_path / family)
        with pytest.raises(DataError, match=r"model\.path .*cannot be loaded as a causal language model") as refused:
            policy_of(tmp_path / family)
        assert "\n" not in str(refused.value)


def test_sequences_longer_than_a_table_of_positions_are_refused_at_start(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "gpt2", n_positions=50, max_position_embeddings=50)
    with pytest.raises(DataError, match=r"learned positions for 50 tokens, but a row may have \d+: reduce data\."):
        policy_of(folder)


@pytest.mark.parametrize("turns", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_longest_of_a_batch_are_refused_beyond_their_first_range(
    tmp_path: Path, turns: str
) -> None:
    rope = {
        "rope_type": turns,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    for longest, fits in ((4096, True), (64, False)):
        rope["original_max_position_embeddings"] = longest
        folder = make_family(
            tmp_path / turns / str(longest), "llama", rope_parameters=dict(rope), max_position_embeddings=longest
        )
        if fits:
            assert policy_of(folder).way.layout == "shared"
        else:
            with pytest.raises(DataError, match=r"rope_parameters .* longer than 64 tokens"):
                policy_of(folder)


@pytest.mark.parametrize("family", ["llama", "mamba", "zamba2", "gemma2"])
def test_sharded_it_learns_the_same(tmp_path: Path, family: str) -> None:
    """Each outermost layer by itself, under what a single rank has of FSDP."""
    folder = make_family(tmp_path / "model", family)
    policy = sharded(folder)
    settle(policy, ALONE)
    logp, found = packed(policy)
    assert_same((logp, {name: whole(gradient) for name, gradient in found.items()}), plain(folder))


def sharded(folder: Path) -> Policy:
    model, files = begin_model(str(folder), attention="sdpa", world=ALONE)
    policy = shard(make_policy(model, learner_config(folder), (), ALONE).train(), ALONE, on_host=True)
    return fill(policy, files, ALONE.device)


def test_a_way_that_the_model_raises_of_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also in the middle of a sharded pass, where a layer's parameters are gathered."""
    folder = make_family(tmp_path / "model", "llama")
    policy = sharded(folder)
    attention = policy.model.model.layers[0].self_attn

    def refuse(_module: torch.nn.Module, _args: object, given: dict[str, object]) -> None:
        if policy.way.layout == "shared":
            raise TypeError("no such mask")

    attention.register_forward_pre_hook(refuse, with_kwargs=True)
    settle(policy, ALONE)
    assert policy.way.layout == "packed"
    logp, found = packed(policy)
    assert_same((logp, {name: whole(gradient) for name, gradient in found.items()}), plain(folder))


def test_the_trial_computes_without_tf32_even_if_it_is_enabled(tmp_path: Path) -> None:
    """On GPUs TF32 rounding is as large as the trial's tolerances, and some containers enable it."""
    policy = policy_of(make_family(tmp_path / "model", "llama"))
    seen: set[str] = set()
    policy.model.register_forward_pre_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        settle(policy, ALONE)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"highest"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradicted(World):
    """The double of ranks among which another one says no to the first way, and only to that."""

    asked: list[bool] = field(default_factory=list)

    def all_agree(self, mine: bool) -> bool:
        self.asked.append(mine)
        return mine and len(self.asked) != 3  # the first two are of what the model says, and of its head


def test_a_way_that_is_wrong_on_another_rank_is_wrong_here(tmp_path: Path) -> None:
    policy = policy_of(make_family(tmp_path / "model", "llama"))
    world = Contradicted(rank=0, size=1, device=ALONE.device)
    settle(policy, world)
    assert all(world.asked)
    assert policy.way.layout == "packed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # peft's, of patterns that match nothing
@pytest.mark.parametrize("targets", [["q_proj", "gate_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_adapters_of_experts_are_refused_in_one_line(tmp_path: Path, targets: list[str]) -> None:
    folder = make_family(tmp_path / "model", "qwen3_moe")
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*(fused into|stacked experts)"):
        policy_of(folder, lora={"rank": 4, "targets": targets})


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")  # peft's word, before ours
def test_an_adapter_of_a_convolution_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "lfm2")
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*conv\.conv is not a matrix.*; leave it out"):
        policy_of(folder, lora={"rank": 64, "targets": ["conv.conv"]})


def test_adapters_learn_and_merge_where_layers_are_not_linear_modules(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "gpt2")
    policy = policy_of(folder, lora={"rank": 4, "targets": ["c_attn", "c_proj"]})
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    logp, _ = packed(policy)
    model = load_model(str(folder))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, merged in merged_parameters(policy.model, torch.float32):
            own[name].copy_(merged)
    model.save_pretrained(folder)
    torch.testing.assert_close(logp, plain(folder)[0], atol=TOLERANCE, rtol=0)
