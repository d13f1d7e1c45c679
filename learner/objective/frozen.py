"""The frozen models that give log-probs: reference and teacher.

The reference is the policy as it was before the run: the base model if adapters train, else a frozen copy. On a GPU the
copy may be kept in host memory (`model.reference: cpu`) and pass through the device layer by layer, sharded over the
ranks like the policy: the same numbers, at the cost of copying the model once per forward pass.

A teacher on the learner's ranks is another frozen policy, sharded like the trained one, with its own packing:

    teacher.path ─► the same tokenizer? ─► the model, self-checked ─► log-probs of the policy's samples

Token ids must mean the same to both models: their vocabularies and the tokenisation of some texts are compared; an
error names both models. Temperature and the ban on early ends are the policy's, so that log-probs are comparable.
Blocks on the disk and, if sharded, on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import transformers

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.loading.build import begin_model
from streamrl.learner.loading.load import cast as cast_parameters
from streamrl.learner.loading.load import load_reference, settled
from streamrl.learner.loading.tokenizer import TokenizerInfo, read_tokenizer_info
from streamrl.learner.model.lora import without_adapters
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.packing.attention import choose
from streamrl.learner.packing.micro_batches import MicroBatch, Shape
from streamrl.learner.packing.ways import refuse_long
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.fingerprint import PROBE_TEXTS

FrozenLogprobs = Callable[[MicroBatch], torch.Tensor]  # returns [T] log-probs


def make_reference(config: schema.Config, world: World, end_ids: tuple[int, ...], policy: Policy) -> FrozenLogprobs:
    on_host = config.model.reference == "cpu" and world.device.type != "cpu"
    frozen = policy if config.model.lora else load_reference(config, world, end_ids, like=policy, on_host=on_host)
    return frozen_logprobs(frozen)


def frozen_logprobs(frozen: Policy) -> FrozenLogprobs:
    """Log-probs of the base model, whose routers choose by themselves."""

    def logprobs_of(batch: MicroBatch) -> torch.Tensor:
        with evaluating(frozen), without_adapters(frozen):
            logp: torch.Tensor = frozen(replace(batch, routes=None)).logp
        return logp

    return logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    shape: Shape  # the shape of its micro-batches
    logprobs_of: FrozenLogprobs


def load_teacher(
    config: schema.Config,
    world: World,
    end_ids: tuple[int, ...],
    *,
    wait_for_readers: Callable[[], None] = lambda: None,
) -> Teacher | None:
    """Load the teacher; None if there is none or workers query it. `wait_for_readers`: see `load_policy`."""
    if config.teacher is None or config.teacher.path is None:
        return None
    path = config.teacher.path
    with _as_teacher():
        model, sources = begin_model(path, attention=choose(config.model, world.device), world=world)
        refuse_long(model, config.data.max_prompt_tokens + config.max_response_tokens)
        model.requires_grad_(False)
        if config.model.dtype == "float64":
            cast_parameters(model, torch.float64)
        on_host = config.teacher.place == "cpu" and world.device.type != "cpu"
        policy = settled(model, sources, config, world, end_ids, on_host=on_host, wait_for_readers=wait_for_readers)
    return Teacher(shape=policy.shape, logprobs_of=frozen_logprobs(policy))


def check_teacher(config: schema.Config, info: TokenizerInfo) -> None:
    """Raise DataError if the teacher's tokens differ from the policy's; workers check a served teacher themselves."""
    if config.teacher is None or config.teacher.path is None:
        return
    path, policy = config.teacher.path, config.model.path
    with _as_teacher():
        teacher_info = read_tokenizer_info(path)
    if wrong := differences(info.tokenizer, teacher_info.tokenizer):
        raise DataError(
            f"teacher.path = {path!r} has another tokenizer than model.path = {policy!r}, so token ids would mean "
            f"something else: {wrong}"
        )
    if teacher_info.vocabulary < info.vocabulary:
        raise DataError(
            f"teacher.path = {path!r} has {teacher_info.vocabulary} outputs, fewer than the {info.vocabulary} of "
            f"model.path = {policy!r}: it has no log-prob for the last ones"
        )


def differences(ours: transformers.PreTrainedTokenizerBase, theirs: transformers.PreTrainedTokenizerBase) -> str:
    """Describe how vocabularies or tokenisations differ; empty if they agree. Extra tokens of `theirs` are allowed."""
    own_vocabulary, teacher_vocabulary = ours.get_vocab(), theirs.get_vocab()
    different = sorted(
        (token for token in own_vocabulary if teacher_vocabulary.get(token) != own_vocabulary[token]),
        key=lambda token: own_vocabulary[token],
    )
    if different:
        token = different[0]
        own_id, teacher_id = own_vocabulary[token], teacher_vocabulary.get(token, "nothing")
        count = f"{len(different)} of {len(own_vocabulary)} tokens differ"
        return f"{count}; {token!r}, for one, is {own_id} here and {teacher_id} in the teacher"
    for text in PROBE_TEXTS:
        a, b = (_ids(tokenizer, text) for tokenizer in (ours, theirs))
        if a != b:
            return f"{text!r} is {a} here and {b} in the teacher"
    return ""


def _ids(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@contextmanager
def _as_teacher() -> Iterator[None]:
    """Make errors name `teacher.path` instead of `model.path`."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("model.path", "teacher.path")) from error
