"""`conf/recipes/`: each is what its paper says, to 1e-9 in loss and gradient, over two passes on stale samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.logprobs import LogProbs
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import Teacher
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import group_of
from tests.papers import Response, Responses, objectives

RECIPES = sorted((Path(__file__).parents[2] / "conf" / "recipes").glob("*.yaml"))
MAX_TOKENS = 24
BASE = f"""
model: {{path: model, dtype: float32}}
data: {{train: prompts.jsonl}}
validation: {{every_steps: 0}}
rewards: {{made_up: {{type: function, target: exact_match}}}}
sampling: {{max_tokens: {MAX_TOKENS}}}
"""
OBJECTIVES = objectives(max_tokens=MAX_TOKENS)


class _NoFlops:
    def of_pass(self, pieces: Sequence[Piece]) -> float:
        return 0.0


class TableOfLogprobs:
    """A policy whose log-prob of each token is a parameter of its own."""

    shape = Shape(hidden_size=8, share_prompts=True)
    flops = _NoFlops()
    model, replay = torch.nn.Identity(), None  # it has no routers

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.clone().requires_grad_()  # [samples, places]

    def __call__(self, batch: MicroBatch, *, entropy_learns: bool = False) -> LogProbs:
        logp = self.values[batch.sample, batch.position]
        return LogProbs(logp=logp, entropy=torch.zeros_like(logp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    groups: list[Group]
    masks: list[torch.Tensor]  # of each sample
    old: torch.Tensor  # [samples, places], as all that follow
    now: torch.Tensor
    later: torch.Tensor  # after a step
    reference: torch.Tensor
    teacher: torch.Tensor

    def responses(self, values: torch.Tensor) -> list[Responses]:
        """As the papers' side sees them, with `values` as today's log-probs."""
        found: list[Responses] = []
        at = 0
        for group in self.groups:
            of_group: list[Response] = []
            for sample in group.samples:
                kept = torch.nonzero(self.masks[at])[:, 0]
                of_group.append(
                    Response(
                        reward=sample.reward,
                        finished=sample.finish_reason == "stop",
                        now=values[at][kept],
                        old=self.old[at][kept],
                        proximal=self.now[at][kept],
                        reference=self.reference[at][kept],
                        teacher=self.teacher[at][kept],
                    )
                )
                at += 1
            found.append(of_group)
        return found


def made_groups(num_groups: int = 6, num_samples: int = 5) -> Made:
    """Some samples cut off, some with tokens that were given, ratios on both sides of every bound."""
    rng = np.random.default_rng(7)
    shape = (num_groups * num_samples, MAX_TOKENS)
    old = -rng.exponential(1.0, shape).astype(np.float32)  # as the wire has them
    drift = rng.normal(scale=np.where(rng.random(shape) < 0.1, 1.5, 0.15))
    drift[::3] = rng.normal(scale=1e-4, size=drift[::3].shape)  # within the bounds of whole responses, too
    now = old + drift
    groups: list[Group] = []
    masks: list[torch.Tensor] = []
    for ticket in range(num_groups):
        samples: list[Sample] = []
        for number in range(num_samples):
            length = int(rng.integers(6, MAX_TOKENS + 1))
            runs = (length,) if number % 2 else (2, 3, length - 5)
            spans = [(0, length)] if number % 2 else [(0, 2), (5, length)]
            mask = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
            reward = float(rng.normal())
            samples.append(
                Sample(
                    token_ids=rng.integers(3, 40, length).astype(np.int32),
                    logprobs=np.where(mask, old[len(masks)][:length], np.float32(0)),
                    mask_runs=runs,
                    spans=tuple(Span(version=1, step=0, start=start, end=end) for start, end in spans),
                    finish_reason="length" if number == 3 else "stop",
                    rewards={"made_up": reward},
                    reward=reward,
                )
            )
            masks.append(torch.from_numpy(mask))
        plain = group_of(ticket=ticket, rewards=[0.0], prompt=[5, 6, 7][: ticket % 3 + 1])
        header, body = encode_group(Group(header=plain.header, prompt_ids=plain.prompt_ids, samples=tuple(samples)))
        groups.append(decode_body(decode_header(header), body))
    return Made(
        groups=groups,
        masks=masks,
        old=torch.from_numpy(old.astype(np.float64)),
        now=torch.from_numpy(now),
        later=torch.from_numpy(now + rng.normal(scale=0.2, size=shape)),
        reference=torch.from_numpy(now + rng.normal(scale=0.3, size=shape)),
        teacher=torch.from_numpy(now + rng.normal(scale=0.5, size=shape)),
    )


def config_of(recipe: Path, folder: Path) -> Config:
    (folder / "mine.yaml").write_text(BASE)
    named = ["teacher.path=teacher"] if recipe.stem == "distillation" else []
    loaded = load_config(folder / "mine.yaml", [f"extends=recipes/{recipe.name}", *named])
    check_config(loaded.config, loaded.origin)
    return loaded.config


def test_every_recipe_has_its_paper() -> None:
    assert {recipe.stem for recipe in RECIPES} == set(OBJECTIVES)
    for recipe in RECIPES:
        assert "arXiv" in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_loss_and_gradient_are_the_papers(recipe: Path, tmp_path: Path) -> None:
    config, made = config_of(recipe, tmp_path), made_groups()
    table = TableOfLogprobs(made.now)
    gradients = Gradients(
        policy=cast("Policy", table),
        reference=lambda batch: made.reference[batch.sample, batch.position],
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=World(rank=0, size=1, device=torch.device("cpu")),
        beat=lambda: None,
        # Packed as the policy would not: its log-probs find their tokens all the same.
        teacher=Teacher(
            shape=Shape(hidden_size=8, share_prompts=False, alone=True),
            logprobs_of=lambda batch: made.teacher[batch.sample, batch.position],
        ),
    )
    tally = Tally(sources=("made_up",), step=3, is_dead=lambda _version, _step: False)
    batch = gradients.prepare(made.groups, tally)

    for values in (made.now, made.later):
        with torch.no_grad():
            table.values.copy_(values)
        table.values.grad = None
        loss = gradients.accumulate(batch, tally)

        apart = values.clone().requires_grad_()
        papers = OBJECTIVES[recipe.stem](made.responses(apart))
        papers.backward()
        assert apart.grad is not None
        assert table.values.grad is not None
        assert loss == pytest.approx(float(papers.detach()), abs=1e-9)
        assert float((table.values.grad - apart.grad).abs().max()) < 1e-9
        assert float(apart.grad.abs().max()) > 1e-4, "there is something to compare"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_those_that_sample_dynamically_drop_what_teaches_nothing_and_the_others_do_not(
    recipe: Path, tmp_path: Path
) -> None:
    algorithm = make_algorithm(config_of(recipe, tmp_path).algorithm)

    reason = algorithm.drop_reason(group_of(rewards=[1.0, 1.0, 1.0]).header)

    assert reason == ("zero_variance" if recipe.stem in ("dapo", "cispo", "ppo_clip") else None)
