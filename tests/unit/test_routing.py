"""Routing replay in the learner: its own routes told change no bit; any others are what its experts compute with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from streamrl.config import schema
from streamrl.config.routers import ROUTERS, find_routers
from streamrl.errors import ConfigError, DataError
from streamrl.learner.loading.build import load_model
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.packing.micro_batches import NO_ROUTE, NO_TOKEN, MicroBatch, Piece, Shape
from streamrl.learner.packing.pack import pack
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.branches import Branch, rows_of
from streamrl.protocol.wire.routes import Routes, RouteShape, all_missing, is_missing
from tests.learner_cases import learner_config
from tests.tiny_families import make_family
from tests.unit.test_packing import ALONE, ROWS, SHARED, branched, piece, trees
from tests.unit.test_wire_routes import random_routes

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
PIECES = [piece(i, 2 + i // 4, 1 + (5 * i) % 11, group=i // 4) for i in range(12)]
FAMILIES = ["gpt_oss", "minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("model"), request.param)


def config_of(folder: Path, mode: str, **sections: Any) -> schema.Config:
    return learner_config(folder, algorithm=schema.Algorithm(routing_replay=mode), **sections)


def model64(folder: Path) -> Any:
    """With experts one after the other: the products of groups know no float64."""
    model = load_model(str(folder)).double()
    model.set_experts_implementation("eager")
    return model


def policy_of(folder: Path, mode: str, *, recomputes: bool = False) -> Policy:
    """In float64, a row for each sequence: right for whatever is causal."""
    model = model64(folder)
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    policy = Policy(model, head=Head(compute_dtype=torch.float64), min_tokens=0, dtype=torch.float64)
    policy.shape = ROWS
    policy.replay = None if mode == "none" else RoutingReplay(model, config_of(folder, mode))
    return policy


def tally() -> Tally:
    return Tally(sources=(), step=0, is_dead=lambda _version, _step: False)


def learn(policy: Policy, batches: Sequence[MicroBatch]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    policy.zero_grad()
    found = []
    for batch in batches:
        logp = policy(batch).logp
        (logp * torch.arange(1, len(logp) + 1)).sum().backward()
        found.append(logp.detach())
    return found, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def own_choice(policy: Policy, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same, with what the routers choose by themselves."""
    assert policy.replay is not None
    found = []
    for batch in batches:
        with torch.no_grad():
            policy(batch)
        found.append(policy.replay.passed(batch, tally(), first=True))
    return found


def told(pieces: Sequence[Piece], shape: RouteShape, *, seed: int = 0) -> list[Piece]:
    """Random routes, the same to a prompt wherever it is, and to some tokens none."""
    found = []
    for one in pieces:
        of_prompt = random_routes(len(one.prompt_ids), shape, seed=1000 + one.group)
        own = random_routes(len(one.token_ids), shape, seed=seed + one.sample)
        own[np.random.default_rng(one.sample).random(len(own)) < 0.2] = np.iinfo(own.dtype).max
        found.append(replace(one, routes=np.concatenate([of_prompt, own])))
    return found


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_familys_own_choice_told_to_it_changes_no_bit(folder: Path, recomputes: bool) -> None:
    batches = pack(PIECES, max_tokens=60, shape=ROWS)
    logp, gradients = learn(policy_of(folder, "none", recomputes=recomputes), batches)
    chosen = own_choice(policy_of(folder, "first_pass"), batches)
    for batch in chosen:
        assert batch.routes is not None
        assert ((batch.routes >= 0) == batch.is_token[..., None, None]).all()
    again, same_gradients = learn(policy_of(folder, "rollout", recomputes=recomputes), chosen)
    assert all(torch.equal(a, b) for a, b in zip(logp, again, strict=True))
    assert gradients.keys() == same_gradients.keys()
    assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)


@contextmanager
def forced(model: nn.Module, routes: Routes) -> Iterator[None]:  # [T, layers, k] of one sequence
    """The family's own code, but that `topk` finds what it is told: it shares nothing with what is tested."""
    real, layers = torch.topk, iter(sorted(find_routers_of(model)))

    def topk(values: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        own = real(values, k, dim=dim)
        layer = next(layers)
        wanted = torch.from_numpy(routes[:, layer].astype(np.int64))
        is_told = torch.from_numpy(~is_missing(routes))[:, None]
        chosen = torch.where(is_told, wanted, own.indices)
        return values.gather(dim, chosen.clamp(max=values.shape[-1] - 1)), chosen

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = real  # type: ignore[assignment]


def find_routers_of(model: nn.Module) -> list[int]:
    names = [name for name, module in model.named_modules() if type(module).__name__ in ROUTERS]
    return [int(name.split(".")[2]) for name in names]


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_other_routes_told_are_those_that_a_family_computes_with(folder: Path, recomputes: bool) -> None:
    policy = policy_of(folder, "rollout", recomputes=recomputes)
    assert policy.replay is not None
    pieces = told(PIECES, policy.replay.shape)
    batches = pack(pieces, max_tokens=60, shape=ROWS)
    found, gradients = learn(policy, batches)
    policy.replay.mode = "compare"
    model = model64(folder)
    for batch, logp in zip(batches, found, strict=True):
        places = torch.arange(1, len(logp) + 1)
        loss = torch.zeros((), dtype=torch.float64)
        for sample in batch.sample.unique().tolist():
            one = pieces[sample]
            ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids])).long()
            assert one.routes is not None
            with forced(model, one.routes):
                logits = model(input_ids=ids[None], use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1]
            truth = logits.log_softmax(-1).gather(1, ids[len(one.prompt_ids) :, None])[:, 0]
            of_sample = batch.sample == sample
            torch.testing.assert_close(logp[of_sample], truth.detach(), atol=1e-6, rtol=0)
            loss = loss + (truth * places[of_sample]).sum()
        loss.backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        got = gradients.get(f"model.{name}", torch.zeros_like(parameter))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert any(grad.any() for name, grad in gradients.items() if "gate.weight" in name or "router.weight" in name)


def test_to_compare_changes_nothing_and_counts_every_pair_that_differs(folder: Path) -> None:
    plain, policy = policy_of(folder, "none"), policy_of(folder, "compare")
    assert policy.replay is not None
    shape = policy.replay.shape
    batches = pack(told(PIECES, shape), max_tokens=60, shape=ROWS)
    own = own_choice(policy_of(folder, "first_pass"), [replace(batch, routes=None) for batch in batches])
    counts = tally()
    for batch in batches:
        with torch.no_grad():
            assert torch.equal(policy(batch).logp, plain(batch).logp)
        policy.replay.passed(batch, counts, first=True)
    layers = find_routers_of(policy.model)
    pairs, missing, differing = 0, 0, 0
    for batch, chosen in zip(batches, own, strict=True):
        assert batch.routes is not None
        assert chosen.routes is not None
        for ours, theirs in zip(chosen.routes.flatten(0, 1), batch.routes.flatten(0, 1), strict=True):
            for layer in layers:
                if theirs[layer, 0] == NO_TOKEN:
                    continue
                pairs += 1
                missing += int(theirs[layer, 0]) == NO_ROUTE
                differing += theirs[layer, 0] >= 0 and set(ours[layer].tolist()) != set(theirs[layer].tolist())
    metrics = counts.metrics(WORLD)
    assert metrics["router/routes_missing"] == pytest.approx(missing / pairs)
    assert metrics["router/routes_differ"] == pytest.approx(differing / (pairs - missing))
    assert 0 < missing < pairs
    assert differing > 0


@settings(max_examples=100)
@given(
    trees=st.lists(trees(), min_size=1, max_size=6),
    max_tokens=st.integers(1, 200),
    shape=st.sampled_from([SHARED, ALONE, ROWS]),
)
def test_every_cell_has_the_route_of_its_token(
    trees: list[tuple[int, list[int], list[Branch]]], max_tokens: int, shape: Shape
) -> None:
    num_prompt = trees[0][0]
    trees = [(n, own, kept) for n, own, kept in trees if n == num_prompt]  # all of one group
    made = [branched(i, n, own, kept, group=0) for i, (n, own, kept) in enumerate(trees)]
    pieces = told(made, RouteShape(2, 2, 200), seed=7)
    for batch in pack([one for one in pieces if one.mask.any()], max_tokens=max_tokens, shape=shape):
        assert batch.routes is not None
        length, seen = batch.input_ids.shape[1], torch.zeros_like(batch.input_ids, dtype=torch.bool)
        visible = batch.attention_mask()[:, 0]
        for index, position, sample in zip(
            batch.index.tolist(), batch.position.tolist(), batch.sample.tolist(), strict=True
        ):
            own = pieces[sample]
            rows = rows_of(num_prompt, len(own.token_ids), own.branches)
            starts = [0, *(branch.start for branch in own.branches)]
            sequence = rows[max(r for r, start in enumerate(starts) if start <= position)].tolist()
            at = sequence.index(num_prompt + position)
            row, column = divmod(index, length)
            assert own.routes is not None
            expected = own.routes[sequence[:at]].astype(np.int16)
            expected[expected == np.iinfo(np.uint8).max] = NO_ROUTE
            assert batch.routes[row, visible[row, column]].tolist() == expected.tolist()
            seen[row] |= visible[row, column]
        assert (batch.routes[~seen & (batch.input_ids == 0)] == NO_TOKEN).all()
        assert ((batch.routes != NO_TOKEN) == batch.is_token[..., None, None]).all()


def test_pieces_without_routes_among_others_are_told_none() -> None:
    one, other = PIECES[0], PIECES[1]
    routed = replace(one, routes=all_missing(len(one.prompt_ids) + len(one.token_ids), random_routes(1, TWO)))
    [batch] = pack([routed, other], max_tokens=1000, shape=ROWS)
    assert batch.routes is not None
    assert set(batch.routes.flatten().tolist()) <= {NO_ROUTE, NO_TOKEN}
    [plain] = pack([one, other], max_tokens=1000, shape=ROWS)
    assert plain.routes is None


TWO = RouteShape(2, 2, 4)


def test_the_first_pass_is_what_later_passes_are_told(folder: Path) -> None:
    policy = policy_of(folder, "first_pass")
    assert policy.replay is not None
    [batch] = pack(PIECES[:4], max_tokens=1000, shape=ROWS)
    with torch.no_grad():
        policy(batch)
    first = tally()
    later = policy.replay.passed(batch, first, first=True)
    assert "router/routes_differ" not in first.metrics(WORLD), "nothing was told yet"
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                parameter.neg_()
        policy(later)
    second = tally()
    assert policy.replay.passed(later, second, first=False) is later
    assert second.metrics(WORLD)["router/routes_differ"] > 0.5


class Counts(Tally):
    """Remembers how many (token, expert layer) pairs it was told of."""

    num_pairs = 0

    def add_routes(self, counts: torch.Tensor) -> None:
        self.num_pairs += int(counts[0])


@pytest.mark.parametrize("mode", ["compare", "first_pass"])
def test_tokens_are_counted_and_cells_without_one_are_not(folder: Path, mode: str) -> None:
    policy = policy_of(folder, mode)
    assert policy.replay is not None
    pieces = told(PIECES, policy.replay.shape) if mode == "compare" else PIECES
    batches = pack(pieces, max_tokens=60, shape=ROWS)
    assert sum(batch.input_ids.numel() for batch in batches) > sum(one.num_tokens for one in pieces)
    counts = Counts(sources=(), step=0, is_dead=lambda _version, _step: False)
    for batch in batches:
        with torch.no_grad():
            policy(batch)
            later = policy.replay.passed(batch, counts, first=True)
            policy(later)
        policy.replay.passed(later, counts, first=False)
    assert counts.num_pairs == sum(one.num_tokens for one in pieces) * len(find_routers_of(policy.model))


def test_models_whose_routes_cannot_be_replayed_are_refused_by_name(tmp_path: Path) -> None:
    for family, words in (
        ("qwen3", r"algorithm\.routing_replay = rollout: .*Qwen3ForCausalLM, which has no experts: set it to none"),
        ("deepseek_v3", r"DeepseekV3ForCausalLM, whose experts are chosen by DeepseekV3TopkRouter; supported: Gpt"),
    ):
        made = make_family(tmp_path / family, family)
        model = transformers.AutoModelForCausalLM.from_pretrained(made)
        with pytest.raises(DataError, match=words):
            find_routers(model, config_of(made, "rollout"))


def test_routes_that_a_message_could_not_hold_are_refused_with_both_numbers(tmp_path: Path) -> None:
    made = make_family(tmp_path / "model", "mixtral")
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    sampling = schema.Sampling(num_samples=1024, max_tokens=1 << 17)
    with pytest.raises(ConfigError, match=r"536871424 bytes of routes .* limit is 268435456: .*sampling\.num_samples"):
        find_routers(
            model, config_of(made, "rollout", sampling=sampling, data=schema.Data(train="", max_prompt_tokens=128))
        )
    find_routers(model, config_of(made, "first_pass", sampling=sampling))
