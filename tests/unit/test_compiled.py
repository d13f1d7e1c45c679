"""Decoder layers compiled by torch: what they learn is what they learn without, and what cannot be compiled is said."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from structlog.testing import capture_logs
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.compilers import nop

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointState
from streamrl.learner.checkpoints.export import write_weights
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.loading import load
from streamrl.learner.loading.build import build_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.model.compiled import all_compile, compile_layers, compiles, refuse_compiling, with_layers
from streamrl.learner.model.logits import Chunk, Functions, Head, InPlace, OrInPlace, Reduced
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.objective.optimizer import make_optimizer
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.packing.pack import pack
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.shards import write_shard
from tests.tiny_families import make_family
from tests.unit.test_packing import piece

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
CUDA = torch.device("cuda")
PIECES = [piece(i, 2 + i // 4, 1 + (5 * i) % 11, group=i // 4) for i in range(12)]


def policy_of(folder: Path, dtype: str, *, is_compiled: bool) -> Policy:
    asked = {"path": str(folder), "dtype": dtype, "compile": is_compiled, "gradient_checkpointing": dtype == "float32"}
    return load_policy(learner_config(folder, model=schema.Model.model_validate(asked)), ALONE, (1,))


def learnt(policy: Policy) -> dict[str, torch.Tensor]:
    """Of rows of several shapes: log-probs without gradients and with them, and gradients by the names of weights."""
    found = {}
    for tokens in (30, 200):
        for at, batch in enumerate(pack(PIECES, max_tokens=tokens, shape=policy.shape)):
            with evaluating(policy):
                found[f"{tokens}, {at}: asked"] = policy(batch).logp
            logp = policy(batch).logp
            (logp * torch.arange(1, len(logp) + 1)).sum().backward()
            found[f"{tokens}, {at}"] = logp.detach()
    gradients = {name: whole(p.grad).clone() for name, p in policy.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(policy.parameters()))
    return found | gradients


def apart(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], names: list[str]) -> float:
    """The distance of all together, over their length."""
    square = sum(float((some[name] - others[name]).double().square().sum()) for name in names)
    return (square / sum(float(others[name].double().square().sum()) for name in names)) ** 0.5


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_learn_what_they_learn_without(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, which FSDP gathers: no further from float32 than without (0.022 of the gradient, and 0.026)."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    counters.clear()
    torch._dynamo.reset()
    folder = make_family(tmp_path / "model", "qwen3", num_hidden_layers=3)
    exact = learnt(policy_of(folder, "float32", is_compiled=False))
    plain = learnt(policy_of(folder, dtype, is_compiled=False))
    assert not counters["stats"]["calls_captured"]
    with torch._inductor.config.patch(compile_threads=1):  # here, and in no processes of its own
        compiled = learnt(policy_of(folder, dtype, is_compiled=True))
    assert counters["stats"]["calls_captured"] > 0, "layers were compiled"
    assert not counters["graph_break"], "and whole"
    gradients = [name for name in exact if name.endswith("weight")]
    logps = [name for name in exact if name not in gradients]
    for names in (gradients, logps):
        assert apart(compiled, exact, names) < 1e-5 + 1.1 * apart(plain, exact, names)


@pytest.mark.parametrize(
    ("settings", "layout", "device", "are_compiled"),
    [
        ({"dtype": "bfloat16"}, {}, "cuda", True),
        ({"dtype": "bfloat16"}, {}, "cpu", False),
        ({"dtype": "float32"}, {}, "cuda", False),
        ({"dtype": "bfloat16", "compile": False}, {}, "cuda", False),
        ({"dtype": "bfloat16", "lora": {"rank": 4}}, {}, "cuda", False),
        ({"dtype": "bfloat16"}, {"context": 2}, "cuda", False),
        ({"dtype": "bfloat16"}, {"tensor": 2}, "cuda", False),
        ({"dtype": "float32", "compile": True}, {}, "cpu", True),
    ],
)
def test_layers_are_compiled_on_gpus_if_they_are_whole_unless_it_is_said_otherwise(
    tmp_path: Path, settings: dict[str, Any], layout: dict[str, int], device: str, are_compiled: bool
) -> None:
    dense = build_model(str(make_family(tmp_path, "llama")), MASKED)
    config = learner_config(tmp_path, model=schema.Model.model_validate({"path": "m", **settings}))
    divided = config.learner.model_copy(update={"layout": schema.Layout.model_validate(layout)})
    config = config.model_copy(update={"learner": divided})
    assert compiles(config, dense, World(rank=0, size=1, device=torch.device(device))) == are_compiled


def test_each_host_without_a_compiler_says_so_once_and_the_first_rank_that_another_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Against(World):
        def all_agree(self, agrees: bool) -> bool:
            return False

    dense = build_model(str(make_family(tmp_path, "llama")), MASKED)
    config = learner_config(tmp_path, model=schema.Model(path="m", dtype="bfloat16"))
    with capture_logs() as logs:
        for rank in (0, 8):  # both can
            assert not all_compile(with_layers(config, compiled=True), Against(rank=rank, size=16, device=CUDA))
    assert [line["event"] for line in logs] == ["layers are not compiled"]
    assert "another host" in logs[0]["reason"]

    monkeypatch.setenv("CXX", "no-such-compiler")
    with capture_logs() as logs:
        for rank in range(8, 16):
            world = Against(rank=rank, size=16, local_size=8, device=CUDA)
            assert not compiles(config, dense, world)
            assert not all_compile(with_layers(config, compiled=False), world)
    assert [line["event"] for line in logs] == ["layers are not compiled"]
    assert "no-such-compiler" in logs[0]["reason"]


def test_if_another_rank_has_no_compiler_none_compiles_or_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_on = []

    class Apart(World):
        def all_agree(self, agrees: bool) -> bool:
            return agrees and not is_settled

    def settled(*args: Any, **options: Any) -> Policy:
        nonlocal is_settled
        policy = in_earnest(*args, **options)
        is_settled = True
        return policy

    def recomputes(config: schema.Config, *_args: Any, **_options: Any) -> bool:
        counted_on.append(config.model.compile)
        return False

    is_settled, in_earnest = False, load.settled
    monkeypatch.setattr(load, "settled", settled)
    monkeypatch.setattr(load, "compiles", lambda *_args: True)
    monkeypatch.setattr(load, "compile_layers", lambda *_args, **_options: pytest.fail("compiled"))
    monkeypatch.setattr(load, "recomputes", recomputes)
    folder = make_family(tmp_path, "llama")
    load_policy(learner_config(folder), Apart(rank=0, size=1, device=torch.device("cpu")), (1,))
    assert counted_on == [False]


@pytest.mark.parametrize("or_go_on", [True, False])
@pytest.mark.parametrize("part", ["fw_compiler", "bw_compiler"])
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_what_cannot_be_compiled_computes_as_it_is_if_nobody_asked_for_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, or_go_on: bool
) -> None:
    """Also if only the backward pass cannot be, which torch would compile when it comes to it."""
    asked = []

    def broken(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> None:
        asked.append(graph)
        raise OSError("no place for what is compiled")

    compilers = {"fw_compiler": nop, "bw_compiler": nop, part: broken}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(**compilers)))
    torch._dynamo.reset()
    policy = policy_of(make_family(tmp_path / "model", "llama"), "float32", is_compiled=False)
    expected = learnt(policy)
    policy.zero_grad()
    compile_layers(policy.model, or_go_on=or_go_on)
    with nullcontext() if or_go_on else pytest.raises(BackendCompilerFailed, match="no place for"):
        found = learnt(policy)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(asked) == 1 + or_go_on  # a layer each


def test_log_probs_that_cannot_be_compiled_are_computed_in_place_from_then_on() -> None:
    calls = []

    class Failing(Functions):
        def reduce(self, chunk: Chunk, head: Head) -> Reduced:
            calls.append(chunk)
            raise KeyError("no compiler")

    projected = torch.randn(3, 7)

    def chunk() -> Chunk:
        return Chunk(projected.clone(), None, torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.bool))

    passes = OrInPlace(Failing(), KeyError)
    for _ in range(2):
        torch.testing.assert_close(passes.reduce(chunk(), Head()), InPlace().reduce(chunk(), Head()))
    assert len(calls) == 1


def test_a_mixture_a_recurrence_and_a_machine_without_a_compiler_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = build_model(str(make_family(tmp_path / "mixture", "qwen3_moe")), MASKED)
    with pytest.raises(ConfigError, match=r"model\.compile = true: Qwen3MoeForCausalLM is a mixture .*set it to false"):
        refuse_compiling(mixture)
    recurrent = build_model(str(make_family(tmp_path / "recurrent", "mamba")), MASKED)
    with pytest.raises(ConfigError, match=r"MambaForCausalLM may depend on more than attention \(.*set it to false"):
        refuse_compiling(recurrent)
    dense = build_model(str(make_family(tmp_path / "dense", "llama")), MASKED)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"model\.compile = true: .* no no-such-compiler on PATH; install one"):
        refuse_compiling(dense)


def test_what_a_run_with_compiled_layers_has_learned_is_read_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "model", "llama")
    model = schema.Model(path=str(folder), dtype="float32", compile=True)
    config = learner_config(folder, dir=tmp_path, model=model)
    policy = load_policy(with_layers(config, compiled=False), ALONE, (1,))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.25
    write_shard(tmp_path, policy, make_optimizer(policy, config.optimizer), ALONE)
    state = CheckpointState(run_uid="", step=1, stream=FeedState(), data_fingerprint="", extra={})
    checkpoint = Checkpoint(name=CheckpointName(1, 1), folder=tmp_path, state=state)
    monkeypatch.setenv("CXX", "no-such-compiler")

    write_weights(config, tmp_path / "weights.safetensors", checkpoint=checkpoint)

    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in policy.model.named_parameters())
