"""Examines the learner's inputs, in this order, and stops at the first mistake.

    own loss and advantages ─► tokenizer ─► prompts, by the run's own reader ─► the model on `meta`, its LoRA targets
                                                         ─► a teacher's tokenizer
                                                         ─► GPU memory of a rank, and the best layout for its GPUs

A mistake is the error that the learner would raise some minutes later. Loads no weights and downloads nothing: a model
that is only on a hub is left to the learner. Blocks on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.config.of_model import longest_sequence, refuse_unseen_stops
from streamrl.config.placement import StartedPart
from streamrl.config.routers import find_routers
from streamrl.finding import Finding, ok, warning
from streamrl.learner.preflight.here import is_downloaded
from streamrl.learner.preflight.memory import check_memory
from streamrl.learner.preflight.prompts import check_prompts

if TYPE_CHECKING:
    from streamrl.learner.loading.tokenizer import TokenizerInfo


def examine(config: schema.Config, part: StartedPart = "all", hosts: range | None = None) -> Iterator[Finding]:
    """Yield findings; raises UserError for what would stop any learner. `hosts`: the learner's; None: not known."""
    from streamrl.learner.objective.trial import try_out  # imports only torch: half the import time of transformers

    try_out(config)
    yield ok("algorithm", f"{config.algorithm.name} runs on synthetic groups")
    if not is_downloaded(config.model.path):
        yield warning(
            "model",
            f"model.path = {config.model.path!r} is not on this machine yet: neither it nor the prompts were checked",
            "the learner checks both once it is downloaded",
        )
        return
    from streamrl.learner.loading.load import outline
    from streamrl.learner.loading.tokenizer import read_tokenizer_info
    from streamrl.learner.parallel.context import refuse_heads

    info = read_tokenizer_info(config.model.path)
    refuse_unseen_stops(config, info.tokenizer, info.end_ids)
    yield from check_prompts(config, info)
    model = outline(config)
    refuse_heads(model, config.learner.layout.context)
    longest_sequence(
        config, config.model.path, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    )
    yield ok("model structure", "it is a causal language model with room for the longest sequence")
    if config.algorithm.routing_replay != "none":
        find_routers(model, config)
        yield ok("routers", "their choice of experts can be replayed")
    yield from _teacher(config, info)
    yield from check_memory(config, model, part, range(1, 2) if part == "all" else hosts)


def _teacher(config: schema.Config, info: TokenizerInfo) -> Iterator[Finding]:
    from streamrl.learner.objective.frozen import check_teacher

    path = None if config.teacher is None else config.teacher.path
    if path is None:
        return
    if not is_downloaded(path):
        yield warning("teacher", f"teacher.path = {path!r} is not on this machine yet", "the learner downloads it")
        return
    check_teacher(config, info)
    yield ok("teacher", "its tokens match the policy's")
